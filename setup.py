"""Builds the kernels of the engine, the memory of words and the chains of hashes, plain C libraries loaded with ctypes.

Everything else about the package is in pyproject.toml. Optional: without a C++ compiler the package installs all
the same, runs the model with torch and reads words in Python. For development: ``python setup.py build_ext --inplace``.
"""

from __future__ import annotations

import glob

from setuptools import Extension, setup

SOURCES = "kvbaton/engine/_native"
# Compilers warn about the deliberately undefined registers of their own intrinsics headers.
QUIET = ["-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]

setup(
    ext_modules=[
        Extension(
            "kvbaton.engine._kernels",
            sources=sorted(glob.glob(f"{SOURCES}/*.cpp")),
            depends=sorted(glob.glob(f"{SOURCES}/*.h")),
            language="c++",
            # No contraction: where a multiply and an add fuse is written down, so a row's bits never depend on how
            # compiler treated the loop it ran through.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-ffp-contract=off",
                "-pthread",
                "-Wno-psabi",
                *QUIET,
            ],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        *(
            Extension(
                f"kvbaton.{room}._{name}",
                sources=[f"kvbaton/{room}/_native/{name}.cpp"],
                language="c++",
                extra_compile_args=["-std=c++17", "-O3", "-g0"],
                optional=True,
            )
            for room, name in (("text", "words"), ("kv", "hashes"))
        ),
    ]
)
