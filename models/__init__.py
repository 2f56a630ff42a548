"""Byte language models that are told where segments begin."""

from models.sizes import SIZES, Size
from models.unet import ByteUNet

__all__ = ["SIZES", "ByteUNet", "Size"]
