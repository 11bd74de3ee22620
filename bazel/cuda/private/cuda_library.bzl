# SPDX-License-Identifier: Apache-2.0
"""The rule that compiles CUDA C++; see ../defs.bzl."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda_toolkit//:config.bzl", "ARCHITECTURES", "KNOWN_ARCHITECTURES")
load(":architectures.bzl", "gencode_options", "parse_architectures")
load(":settings.bzl", "StringSettingInfo")

# What this rule decides itself, and why a target must not.
_FORBIDDEN = {
    "-arch": "architectures are chosen by HERMETIC_CUDA_COMPUTE_CAPABILITIES",
    "--gpu-architecture": "architectures are chosen by HERMETIC_CUDA_COMPUTE_CAPABILITIES",
    "-gencode": "architectures are chosen by HERMETIC_CUDA_COMPUTE_CAPABILITIES",
    "--generate-code": "architectures are chosen by HERMETIC_CUDA_COMPUTE_CAPABILITIES",
    "-code": "architectures are chosen by HERMETIC_CUDA_COMPUTE_CAPABILITIES",
    "-rdc": "relocatable device code needs a device link, which this rule does not do",
    "--relocatable-device-code": "relocatable device code needs a device link, which this rule does not do",
    "-dc": "relocatable device code needs a device link, which this rule does not do",
    "-ccbin": "the host compiler is the one of the C++ toolchain",
    "--compiler-bindir": "the host compiler is the one of the C++ toolchain",
    "-lineinfo": "it writes source paths of this build into the object",
}

_COMMON = [
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    # A host function called from device code is a mistake that would otherwise show at run time.
    "-Werror=cross-execution-space-call",
    "-Xcompiler=-fPIC,-Wall,-Wextra,-Wno-unused-parameter",
]

def _check_copts(copts):
    for option in copts:
        name = option.partition("=")[0]
        if name in _FORBIDDEN:
            fail("copts: got '%s'; not allowed: %s" % (option, _FORBIDDEN[name]))

def _architectures(ctx):
    setting = ctx.attr._architectures[StringSettingInfo].value
    parsed = parse_architectures(
        setting or ARCHITECTURES,
        KNOWN_ARCHITECTURES,
        "--//bazel/cuda:architectures" if setting else "HERMETIC_CUDA_COMPUTE_CAPABILITIES",
    )
    if type(parsed) == type(""):
        fail(parsed)
    return parsed

def _compile(ctx, source, cc_toolchain, context, gencode):
    """Declares the action that compiles one translation unit, and returns its object."""
    object_file = ctx.actions.declare_file("_objs/%s/%s.pic.o" % (
        ctx.label.name,
        source.short_path.replace("../", "").replace("/", "_"),
    ))
    toolkit = ctx.file._toolkit
    arguments = ctx.actions.args()
    arguments.add(object_file)
    arguments.add(toolkit.path + "/bin/nvcc")
    arguments.add_all(_COMMON)
    arguments.add_all(gencode)
    arguments.add("-ccbin", cc_toolchain.compiler_executable)
    arguments.add_all(ctx.attr.copts)

    # Equal bytes from every checkout. -objtemp takes temporary names out of the object; the front end otherwise derives the
    # names of anonymous namespaces from the path of the sandbox.
    arguments.add("-objtemp")
    arguments.add("-Xcudafe", "--orig_src_path_name=" + source.short_path)
    arguments.add("-Xcompiler", "-ffile-prefix-map=" + ctx.bin_dir.path + "=.")
    arguments.add_all(depset(transitive = [context.defines, context.local_defines]), before_each = "-D")
    arguments.add_all(ctx.attr.defines, before_each = "-D")
    arguments.add("-I.")
    arguments.add_all(context.quote_includes, before_each = "-I")
    arguments.add_all(context.includes, before_each = "-I")
    arguments.add_all(context.system_includes, before_each = "-isystem")
    arguments.add("-x", "cu")
    arguments.add("-c", source)
    ctx.actions.run(
        executable = ctx.executable._compile,
        arguments = [arguments],
        inputs = depset(
            [source, toolkit] + ctx.files.hdrs,
            transitive = [context.headers, cc_toolchain.all_files],
        ),
        outputs = [object_file],
        mnemonic = "CudaCompile",
        progress_message = "Compiling CUDA %s" % source.short_path,
        # The whole environment: no CUDA of the machine, no user settings.
        env = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
    return object_file

def _cuda_library_impl(ctx):
    _check_copts(ctx.attr.copts)
    cc_toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = [dep[CcInfo] for dep in ctx.attr.deps + [ctx.attr._cudart]]
    own = CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        defines = depset(ctx.attr.defines),
    ))
    merged = cc_common.merge_cc_infos(direct_cc_infos = [own], cc_infos = deps)
    gencode = gencode_options(_architectures(ctx))
    objects = [
        _compile(ctx, source, cc_toolchain, merged.compilation_context, gencode)
        for source in ctx.files.srcs
    ]
    linking_context, outputs = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(pic_objects = depset(objects)),
        linking_contexts = [dep.linking_context for dep in deps],
        alwayslink = ctx.attr.alwayslink,
        disallow_dynamic_library = True,
    )
    library = outputs.library_to_link
    files = [library.pic_static_library] if library and library.pic_static_library else []
    return [
        DefaultInfo(files = depset(files)),
        OutputGroupInfo(cuda_objects = depset(objects)),
        CcInfo(
            compilation_context = merged.compilation_context,
            linking_context = linking_context,
        ),
    ]

cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"], mandatory = True, allow_empty = False),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh", ".inc"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "copts": attr.string_list(),
        "defines": attr.string_list(),
        "alwayslink": attr.bool(default = False),
        "_architectures": attr.label(default = "//bazel/cuda:architectures"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_compile": attr.label(
            default = "//bazel/cuda/private:compile.sh",
            executable = True,
            allow_single_file = True,
            cfg = "exec",
        ),
        "_cudart": attr.label(default = "@cuda_toolkit//:cudart"),
        "_toolkit": attr.label(default = "@cuda_toolkit//:toolkit_folder", allow_single_file = True),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    incompatible_use_toolchain_transition = True,
    doc = "Compiles CUDA C++, one action per translation unit; see bazel/cuda/defs.bzl.",
)
