"""FlashAttention-3 in Python: exact attention for Hopper GPUs, and an exact tiled one for every other device."""

from fa3 import mods
from fa3.block_masks import create_block_mask
from fa3.errors import BackendError, CompileError, FA3Error, StoreError
from fa3.fp8 import flash_attn_fp8_func, flash_attn_quantized_func, quantize_qkv
from fa3.interface import flash_attn_func, flash_attn_qkvpacked_func
from fa3.mods import BlockMask, MaskMod, ScoreMod
from fa3.quantization import QuantizedQKV
from fa3.reference import reference

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendError",
    "BlockMask",
    "CompileError",
    "FA3Error",
    "MaskMod",
    "QuantizedQKV",
    "ScoreMod",
    "StoreError",
    "__version__",
    "create_block_mask",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_quantized_func",
    "mods",
    "quantize_qkv",
    "reference",
]
