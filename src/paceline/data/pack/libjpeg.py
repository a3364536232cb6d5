"""Rewrites a JPEG's entropy coding without touching its coefficients, through the libjpeg that comes with Pillow.

No Python package offers this (it is what `jpegtran` does), so the C library is called through ctypes:

- Which library: the one bundled with Pillow's wheels, else the system's. Nothing is linked at build time.
- The ABI: libjpeg's caller allocates its structures, and so must know their layout. Only the leading fields that are
  used here are mirrored (_Errors, _Compress, _Decompress, from jpeglib.h), with room behind them for the rest.
- The guard: jpeg_CreateCompress and jpeg_CreateDecompress are handed the interface version (62, libjpeg-turbo's
  default) and the size of the structure, and complain with what they expected. `_size_of` provokes that complaint to
  learn the true sizes. Any other version makes `available()` false, and packing without loss is refused with a remedy.
- Errors: libjpeg expects its error callback never to return, which Python cannot do by longjmp. The callback therefore
  ends the process with status FATAL: pool.py runs `rewrite` in worker processes, and packs such an image as it is.
- Trust: tiles.retile decodes the result with another decoder and compares every pixel before it uses it.

What to check when Pillow changes its libjpeg: tests/unit/test_tiles.py.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray

ABI = 62
"""The version of libjpeg's interface whose structures are mirrored here."""

FATAL = 70
"""Exit status of a process in which libjpeg met a fault that it cannot recover from."""

_ROOM = 4096
"""More bytes than any structure of libjpeg takes."""

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Errors(ctypes.Structure):
    """The head of jpeg_error_mgr."""

    _fields_ = (
        ("error_exit", _Callback),
        ("emit_message", ctypes.c_void_p),
        ("output_message", _Callback),
        ("format_message", ctypes.c_void_p),
        ("reset_error_mgr", ctypes.c_void_p),
        ("message", ctypes.c_int),
        ("numbers", ctypes.c_int * 20),
        ("trace_level", ctypes.c_int),
        ("warnings", ctypes.c_long),
        ("rest", ctypes.c_byte * 256),
    )


class _Compress(ctypes.Structure):
    """The head of jpeg_compress_struct."""

    _fields_ = (
        ("errors", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("client", ctypes.c_void_p),
        ("is_decompressor", ctypes.c_int),
        ("state", ctypes.c_int),
        ("destination", ctypes.c_void_p),
        ("width", ctypes.c_uint),
        ("height", ctypes.c_uint),
        ("input_components", ctypes.c_int),
        ("input_colors", ctypes.c_int),
        ("gamma", ctypes.c_double),
        ("precision", ctypes.c_int),
        ("components", ctypes.c_int),
        ("colors", ctypes.c_int),
        ("component_info", ctypes.c_void_p),
        ("quantizers", ctypes.c_void_p * 4),
        ("codes", ctypes.c_void_p * 8),
        ("arithmetic", ctypes.c_ubyte * 48),
        ("scans", ctypes.c_int),
        ("scan_info", ctypes.c_void_p),
        ("raw", ctypes.c_int),
        ("arithmetic_coding", ctypes.c_int),
        ("optimize_codes", ctypes.c_int),
        ("cosited", ctypes.c_int),
        ("smoothing", ctypes.c_int),
        ("transform", ctypes.c_int),
        ("restart_interval", ctypes.c_uint),
        ("restart_rows", ctypes.c_int),
        ("rest", ctypes.c_byte * _ROOM),
    )


class _Decompress(ctypes.Structure):
    """The head of jpeg_decompress_struct."""

    _fields_ = (("errors", ctypes.c_void_p), ("rest", ctypes.c_byte * _ROOM))


@cache
def _library() -> tuple[Any, int, int] | None:
    """libjpeg and the sizes of its two structures; None where it is missing or of another version."""
    package = Path(PIL.__file__).parent
    bundled = [*package.parent.glob("pillow.libs/libjpeg*.so*"), *package.glob(".dylibs/libjpeg*.dylib")]
    system = ctypes.util.find_library("jpeg")
    for name in [*map(str, sorted(bundled)), *([system] if system else [])]:
        try:
            library = ctypes.CDLL(name)
            library.jpeg_read_coefficients.restype = ctypes.c_void_p
            writing = _size_of(_Compress(), library, library.jpeg_CreateCompress, library.jpeg_destroy_compress)
            reading = _size_of(_Decompress(), library, library.jpeg_CreateDecompress, library.jpeg_destroy_decompress)
        except (OSError, AttributeError):
            continue
        if writing and reading:
            return library, writing, reading
    return None


def available() -> bool:
    """Whether this machine has a libjpeg that `rewrite` can use."""
    return _library() is not None


def _size_of(structure: _Compress | _Decompress, library: Any, create: Any, destroy: Any) -> int:
    """The size of a structure, which libjpeg names when it is given a wrong one; 0 where its version is another.

    After that complaint the call goes on, in a buffer that is larger than any of the structures.
    """
    complaints: list[tuple[int, int]] = []
    errors = _errors(library, _end)
    errors.error_exit = _Callback(lambda _: complaints.append((errors.numbers[0], errors.numbers[1])))
    structure.errors = ctypes.addressof(errors)
    create(ctypes.byref(structure), ABI, ctypes.c_size_t(1))
    destroy(ctypes.byref(structure))
    fits = len(complaints) == 1 and complaints[0][1] == 1 and complaints[0][0] <= _ROOM
    return complaints[0][0] if fits else 0


def _errors(library: Any, fatal: Any) -> _Errors:
    """libjpeg's own error handling, but silent, and with another fatal callback."""
    errors = _Errors()
    library.jpeg_std_error(ctypes.byref(errors))
    errors.error_exit, errors.output_message = fatal, _silent
    return errors


_silent = _Callback(lambda _: None)
_end = _Callback(lambda _: os._exit(FATAL))  # libjpeg may not go on from here, and Python cannot jump out of C


def rewrite(encoded: bytes, interval: int) -> bytes | None:
    """Write the same coefficients as one sequential scan with a restart marker after every `interval` units (MCUs).

    None where libjpeg warns of damage. Where it cannot go on at all the process ends with status FATAL: call this in a
    worker process.
    """
    loaded = _library()
    assert loaded is not None, "ask available() first"
    library, writing, reading = loaded
    # One each, because starting to write resets the count of warnings.
    reading_errors, writing_errors = _errors(library, _end), _errors(library, _end)
    source, target = _Decompress(), _Compress()
    source.errors, target.errors = ctypes.addressof(reading_errors), ctypes.addressof(writing_errors)
    into, out_of = ctypes.byref(target), ctypes.byref(source)
    room = 2 * len(encoded) + (1 << 16)
    buffer = ctypes.create_string_buffer(room)
    start, size = ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_ulong(room)

    library.jpeg_CreateDecompress(out_of, ABI, ctypes.c_size_t(reading))
    library.jpeg_CreateCompress(into, ABI, ctypes.c_size_t(writing))
    library.jpeg_mem_src(out_of, encoded, ctypes.c_ulong(len(encoded)))
    library.jpeg_read_header(out_of, 1)
    coefficients = library.jpeg_read_coefficients(out_of)
    library.jpeg_copy_critical_parameters(out_of, into)
    target.optimize_codes, target.restart_interval = 1, interval
    library.jpeg_mem_dest(into, ctypes.byref(start), ctypes.byref(size))
    library.jpeg_write_coefficients(into, ctypes.c_void_p(coefficients))
    library.jpeg_finish_compress(into)
    library.jpeg_finish_decompress(out_of)
    library.jpeg_destroy_compress(into)
    library.jpeg_destroy_decompress(out_of)
    if reading_errors.warnings or start.value != ctypes.addressof(buffer):  # twice the size is no gain
        return None
    return ctypes.string_at(buffer, size.value)


def strict_pixels(encoded: bytes) -> NDArray[np.uint8] | None:
    """Decode an undamaged JPEG; None where the decoder has anything to complain about."""
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(encoded, colorspace="RGB", strict=True)
    except ValueError:
        return None
    return pixels
