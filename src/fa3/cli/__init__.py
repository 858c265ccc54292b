"""The command ``fa3``: one module a subcommand, each with ``add_arguments(parser)`` and ``run(args) -> int``."""
