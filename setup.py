"""Packaging of whale_tf.

TensorFlow itself is no hard requirement: installing whale_tf must never replace the build (tensorflow, -cpu, -gpu)
which a user already has. ``pip install whale_tf[tf]`` adds the plain one where none is there.
"""
import os
import re

from setuptools import find_packages, setup

HERE = os.path.dirname(os.path.abspath(__file__))

with open(os.path.join(HERE, "README.md"), encoding="utf8") as handle:
    LONG_DESCRIPTION = handle.read()

with open(os.path.join(HERE, "whale_tf", "version.py"), encoding="utf8") as handle:
    VERSION = re.search(r'^VERSION = "(.*)"$', handle.read(), re.MULTILINE).group(1)

# What a plain installation needs. It lives in an environment that TensorFlow has settled first, so nothing here may ask for a
# NumPy, a protobuf or a typing_extensions that some TensorFlow cannot load, nor for newer releases than the code uses:
# tests/versions installs this beside every TensorFlow it lists and compares. rich 12 to 14.1 want typing_extensions 4, which
# TensorFlow 2.4 to 2.6 exclude; the newest rich of Python 3.8 and later wants none.
INSTALL_REQUIRES = [
    "numpy>=1.16",
    "networkx>=2.6",
    "typer>=0.9",
    'typing_extensions; python_version < "3.8"',
    'rich>=10.11,<12; python_version < "3.8"',
    'rich>=10.11; python_version >= "3.8"',
]

PLANNER = [  # ortools 9.5 needs protobuf 4, which TensorFlow 1.15.5 does not load
    'ortools>=9.3,<=9.4.1874; python_version < "3.8"',
    'protobuf<3.21; python_version < "3.8"',
    'ortools>=9.3; python_version >= "3.8"',
]
VIZ = ["matplotlib>=3.5"]
ALL = PLANNER + VIZ

EXTRAS_REQUIRE = {
    "tf": [  # of those that are tested (make test-versions) the newest that has a wheel
        'tensorflow==1.15.5; python_version < "3.8"',
        'protobuf<3.21; python_version < "3.8"',
        'tensorflow>=2.4,<2.13; python_version == "3.8"',
        'tensorflow>=2.15,<2.22; python_version >= "3.9"',
    ],
    "planner": PLANNER,
    "viz": VIZ,
    "all": ALL,
    "horovod": ["horovod>=0.28.1"],
    "examples": ["scikit-learn>=1.0"],
    "test": ALL + ["pytest>=7.4", "pytest-timeout>=2.1", "pytest-xdist>=3.5", "hypothesis>=6.79", "scikit-learn>=1.0",
                   "scipy>=1.7"],
    "dev": ["ruff>=0.6", "mypy>=1.4"],
    "notebook": ["nbclient>=0.10", "nbformat>=5.9", "ipykernel>=6.29", "jupyter-core>=5.3"],
}

setup(
    name="whale_tf",
    version=VERSION,
    description="Data, pipeline and tensor parallel training of single-device TensorFlow scripts by graph rewriting",
    long_description=LONG_DESCRIPTION,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.7",
    packages=find_packages(include=["whale_tf", "whale_tf.*"]),
    package_data={"": ["*.json", "*/*.json", "py.typed"]},
    include_package_data=False,
    zip_safe=False,
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["whale = whale_tf.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.7",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
