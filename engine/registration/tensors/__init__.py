"""A checkpoint's tensors: as its files have them, and as values where they are quantized.

`open_tensors` gives what the rest of registration reads, whatever the format. Names are those of
the files; what they are called in the model, and where they go, is not known here.
"""

from engine.registration.tensors.declared import BESIDE, Declared, declared_in
from engine.registration.tensors.files import FLOAT_BYTES, piece_rows
from engine.registration.tensors.gguf_file import GGUF_SUFFIX, GgufFile
from engine.registration.tensors.gguf_names import architecture_of, number_in
from engine.registration.tensors.gguf_steps import gguf_scheme
from engine.registration.tensors.plain import Tensors, open_tensors

__all__ = [
    "BESIDE",
    "FLOAT_BYTES",
    "GGUF_SUFFIX",
    "Declared",
    "GgufFile",
    "Tensors",
    "architecture_of",
    "declared_in",
    "gguf_scheme",
    "number_in",
    "open_tensors",
    "piece_rows",
]
