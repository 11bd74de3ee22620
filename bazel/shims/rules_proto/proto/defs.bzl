"""The protocol buffer rules that are built into Bazel, under the names of the rules_proto module."""

proto_lang_toolchain = native.proto_lang_toolchain
proto_library = native.proto_library
