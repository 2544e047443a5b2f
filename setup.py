"""The one part of this project that pip compiles; without a C compiler it does without."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "bridge.daemon.fetch._rows",
            ["bridge/daemon/fetch/csrc/rows.c"],
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]
)
