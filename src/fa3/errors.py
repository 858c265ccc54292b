"""Errors that fa3 raises itself. Bad arguments raise ``ValueError`` or ``TypeError`` instead."""


class FA3Error(RuntimeError):
    """Base of every error that is about fa3 or the machine, not about an argument."""


class BackendError(FA3Error):
    """The chosen backend cannot run here, or cannot run this problem."""


class CompileError(FA3Error):
    """A kernel could not be compiled or linked; the message names the remedy."""


class StoreError(FA3Error):
    """A store folder or an artifact in it cannot be used; the message names the folder and the remedy."""
