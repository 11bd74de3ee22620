// SPDX-License-Identifier: Apache-2.0
// Checking and translating FFI calls.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "kernels/ffi/call.h"
#include "kernels/ffi/elements.h"
#include "kernels/ffi/schema.h"

namespace attention::ffi {
namespace {

constexpr i64 kMaxSize = std::numeric_limits<i32>::max();
constexpr i64 kMaxThreads = 65536;
// No array is larger, so that products of sizes stay far below what 64 bits hold.
constexpr i64 kMaxElements = i64{1} << 42;

#define ATTENTION_QUOTE(name) #name,
constexpr const char* kOperandNames[] = {ATTENTION_OPERANDS(ATTENTION_QUOTE)};
#undef ATTENTION_QUOTE

bool has_zero(const Buffer& buffer) {
  for (int i = 0; i < buffer.rank; ++i) {
    if (buffer.dims[i] == 0) return true;
  }
  return false;
}

bool to_dtype(Element element, DType* dtype) {
  switch (element) {
    case Element::kFloat32:
      *dtype = DType::kFloat32;
      return true;
    case Element::kBFloat16:
      *dtype = DType::kBFloat16;
      return true;
    case Element::kFloat16:
      *dtype = DType::kFloat16;
      return true;
    default:
      return false;
  }
}

Element to_element(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Element::kFloat32;
    case DType::kBFloat16:
      return Element::kBFloat16;
    case DType::kFloat16:
      return Element::kFloat16;
  }
  return Element::kOther;
}

// Decodes one call and keeps the first thing that is wrong.
class Decoder {
 public:
  Decoder(BufferList operands, BufferList results, const Attributes& attributes, Problem* problem)
      : operands_(operands), results_(results), attributes_(attributes), problem_(*problem) {}

  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }

  // Everything that both directions share. `out` is the array [B, Lq, Hq, Dv] that gives the sizes.
  void decode_problem(const Buffer& out) {
    decode_sizes(out);
    if (ok()) decode_inputs();
    if (ok()) decode_scalars();
    if (ok()) decode_score_operands();
    if (ok()) decode_vectors();
    if (ok()) decode_block_mask();
  }

  bool counts(int operands, int results) {
    if (operands_.size != operands || results_.size != results) {
      fail("got %d operands and %d results; wanted %d and %d", operands_.size, results_.size,
           operands, results);
    } else if (attributes_.batch_div_size != kOperandCount) {
      fail("batch_div has %d entries; wanted %d", attributes_.batch_div_size, int{kOperandCount});
    }
    check_buffers("operand", operands_);
    check_buffers("result", results_);
    return ok();
  }

  // A buffer of exactly this element type and shape, or null when something is wrong. A right
  // buffer without elements may be null too.
  template <int kRank>
  void* exactly(const char* name, const Buffer& buffer, Element element, const i64 (&dims)[kRank]) {
    if (!ok()) return nullptr;
    bool same = buffer.element == element && buffer.rank == kRank;
    for (int i = 0; same && i < kRank; ++i) {
      same = dims[i] == kAny ? buffer.dims[i] >= 0 : buffer.dims[i] == dims[i];
    }
    if (!same) {
      fail("%s: got %s%s; wanted %s%s", name, name_of(buffer.element),
           ShapeText(buffer.dims, buffer.rank).text, name_of(element), ShapeText(dims, kRank).text);
      return nullptr;
    }
    if (buffer.data == nullptr && !has_zero(buffer)) {
      fail("%s: got a null pointer for a buffer with elements", name);
    }
    return buffer.data;
  }

  // A result that is there only when a feature asks for it.
  template <int kRank>
  float* optional_result(const char* name, const Buffer& buffer, bool wanted,
                         const i64 (&dims)[kRank]) {
    if (wanted) {
      void* const data = exactly(name, buffer, Element::kFloat32, dims);
      // An empty batch map is {1, 1}, so a launcher would take an empty dbias for one of an entry.
      return ok() && !has_zero(buffer) ? static_cast<float*>(data) : nullptr;
    }
    if (ok() && !has_zero(buffer)) fail("%s: got elements, but they are not asked for", name);
    return nullptr;
  }

  // Kernels keep floats and vectors in it.
  void workspace(const Buffer& buffer, void** data, i64* bytes) {
    *data = exactly("workspace", buffer, Element::kUInt8, {kAny});
    if (ok()) {
      if (const i64 odd = bytes_past(*data, kBufferAlignment); odd != 0) {
        fail("workspace: got an address %lld bytes past a multiple of %lld", odd, kBufferAlignment);
      }
    }
    *bytes = ok() ? buffer.dims[0] : 0;
  }

  bool feature(Feature bit) const { return (attributes_.features & bit) != 0; }

  template <typename... Args>
  void fail(const char* format, Args... args) {
    if (ok()) status_ = Status::error(format, args...);
  }

 private:
  // What holds for every buffer, whatever it is for. The largest axes of an empty array count as
  // well: sizes are multiplied across operands.
  void check_buffers(const char* kind, BufferList buffers) {
    for (int n = 0; n < buffers.size && ok(); ++n) {
      const Buffer& buffer = buffers.data[n];
      i64 elements = 1;
      for (int i = 0; i < buffer.rank && ok(); ++i) {
        const i64 size = buffer.dims[i];
        if (size < 0) {
          fail("%s %d: got an axis of %lld; wanted at least 0", kind, n, size);
        } else if (size > kMaxElements / elements) {
          fail("%s %d: got %s; wanted at most 2^42 elements", kind, n,
               ShapeText(buffer.dims, buffer.rank).text);
        } else {
          elements *= max_of<i64>(size, 1);
        }
      }
      const i64 size = size_of(buffer.element);
      if (const i64 odd = bytes_past(buffer.data, size); odd != 0) {
        fail("%s %d: got an address %lld bytes past a multiple of its element's %lld", kind, n, odd,
             size);
      }
    }
  }

  void decode_sizes(const Buffer& out) {
    const Buffer& q = operands_.data[k_query];
    const Buffer& v = operands_.data[k_value];
    Problem& p = problem_;
    if (q.rank != 4 || v.rank != 4 || out.rank != 4) {
      return fail("query, value and out: got ranks %d, %d and %d; wanted 4", q.rank, v.rank,
                  out.rank);
    }
    if (!to_dtype(q.element, &p.dtype)) {
      return fail("query: got %s; wanted f32, bf16 or f16", name_of(q.element));
    }
    p.batch = out.dims[0];
    p.lq = q.dims[1];
    p.hq = q.dims[2];
    p.d = q.dims[3];
    p.lkv = v.dims[1];
    p.hkv = v.dims[2];
    p.dv = v.dims[3];
    for (i64 size : {p.lq, p.hq, p.d, p.lkv, p.hkv, p.dv}) {
      if (size < 0 || size > kMaxSize) return fail("got an axis of %lld; wanted 0 to 2^31-1", size);
    }
    if (p.batch < 0) return fail("out: got a batch of %lld", p.batch);
    if (p.d < 1 || p.dv < 1) return fail("got head dims %lld and %lld; wanted >= 1", p.d, p.dv);
    if (p.hkv < 1 || p.hq < 1 || p.hq % p.hkv != 0) {
      return fail("got %lld query heads and %lld KV heads; wanted a multiple", p.hq, p.hkv);
    }
    exactly("out", out, q.element, {p.batch, p.lq, p.hq, p.dv});
  }

  // The batch map of an operand whose leading axis is there. Whatever div is, (b / div) % mod stays
  // inside the operand; a map that would use it unevenly is refused as a mistake.
  BatchMap batch_map(int operand) {
    const Buffer& buffer = operands_.data[operand];
    BatchMap map;
    map.div = attributes_.batch_div[operand];
    map.mod = buffer.dims[0];
    if (map.div < 1 || map.mod < 0) {
      fail("%s: got batch_div %lld for %lld entries; wanted at least 1", kOperandNames[operand],
           map.div, map.mod);
    } else if (problem_.batch > 0) {
      const bool divides = map.mod >= 1 && map.div <= problem_.batch &&
                           map.mod <= problem_.batch / map.div &&
                           problem_.batch % (map.mod * map.div) == 0;
      if (!divides) {
        fail("%s: got %lld entries with batch_div %lld; wanted a divisor of the batch of %lld",
             kOperandNames[operand], map.mod, map.div, problem_.batch);
      }
    }
    if (!ok() || map.mod == 0) return BatchMap{};
    return map;
  }

  template <int kRank>
  void* operand(int number, Element element, const i64 (&dims)[kRank]) {
    return exactly(kOperandNames[number], operands_.data[number], element, dims);
  }

  // An operand that a feature bit announces. Without it, its placeholder must be empty: an operand
  // that nobody reads would be a mistake.
  bool present(int number, Feature bit) {
    if (!ok()) return false;
    if (feature(bit)) return true;
    if (!has_zero(operands_.data[number])) {
      fail("%s: got elements without its feature bit", kOperandNames[number]);
    }
    return false;
  }

  void decode_inputs() {
    Problem& p = problem_;
    const Element element = to_element(p.dtype);
    p.q = operand(k_query, element, {kAny, p.lq, p.hq, p.d});
    p.k = operand(k_key, element, {kAny, p.lkv, p.hkv, p.d});
    p.v = operand(k_value, element, {kAny, p.lkv, p.hkv, p.dv});
    if (!ok()) return;
    p.q_batch = batch_map(k_query);
    p.k_batch = batch_map(k_key);
    p.v_batch = batch_map(k_value);
  }

  void decode_scalars() {
    Problem& p = problem_;
    const Attributes& a = attributes_;
    constexpr i64 kAllFeatures = (i64{kFeatureWantDscale} << 1) - 1;
    if (a.features < 0 || a.features > kAllFeatures) {
      return fail("features: got %lld; wanted bits of %lld", a.features, kAllFeatures);
    }
    if (!std::isfinite(a.scale)) return fail("scale: got a number that is not finite");
    p.scale = a.scale;
    const bool caps = feature(kFeatureSoftCap);
    if (caps ? !(std::isfinite(a.soft_cap) && a.soft_cap > 0) : a.soft_cap != 0) {
      return fail("soft_cap: got %g; wanted > 0 with its feature bit, else 0", double{a.soft_cap});
    }
    p.soft_cap = a.soft_cap;
    if (a.window_left < -1 || a.window_right < -1) {
      return fail("window: got (%lld, %lld); wanted >= -1", a.window_left, a.window_right);
    }
    if (!feature(kFeatureWindow) && (a.window_left != -1 || a.window_right != -1)) {
      return fail("window: got sizes without its feature bit");
    }
    p.window_left = a.window_left;
    p.window_right = a.window_right;
    p.causal = feature(kFeatureCausal);
    p.bottom_right = feature(kFeatureBottomRight);
    if (a.precision != 0 && a.precision != 1) return fail("precision: got %d", a.precision);
    p.precision = static_cast<Precision>(a.precision);
    for (i64 size : {a.block_q, a.block_k, a.num_splits}) {
      if (size < 0 || size > kMaxSize) {
        return fail("block_q, block_k, num_splits: got %lld, %lld, %lld; wanted 0 to 2^31-1",
                    a.block_q, a.block_k, a.num_splits);
      }
    }
    if (a.threads < 1 || a.threads > kMaxThreads) {
      return fail("threads: got %lld; wanted 1 to %lld", a.threads, kMaxThreads);
    }
    if (a.dropout_threshold < 0 || a.dropout_threshold > 65536 ||
        !(std::isfinite(a.dropout_keep_scale) && a.dropout_keep_scale >= 0)) {
      return fail("dropout: got threshold %lld, scale %g", a.dropout_threshold,
                  double{a.dropout_keep_scale});
    }
    if (!feature(kFeatureDropout)) return;
    p.dropout.threshold = static_cast<u32>(a.dropout_threshold);
    p.dropout.keep_scale = a.dropout_keep_scale;
  }

  // [Bm, Hq|1, Lq|1, Lkv|1], with strides of 0 along its axes of 1.
  void score_operand(int number, Element element, ScoreOperand* result) {
    const Problem& p = problem_;
    result->data = operand(number, element, {kAny, kAny, kAny, kAny});
    if (!ok()) return;
    const i64* const dims = operands_.data[number].dims;
    const i64 full[] = {p.hq, p.lq, p.lkv};
    for (int i = 0; i < 3; ++i) {
      if (dims[i + 1] != 1 && dims[i + 1] != full[i]) {
        return fail("%s: got %s; wanted each axis 1 or full", kOperandNames[number],
                    ShapeText(dims, 4).text);
      }
    }
    result->batch = batch_map(number);
    result->batch_stride = dims[1] * dims[2] * dims[3];
    result->head_stride = dims[1] == 1 ? 0 : dims[2] * dims[3];
    result->row_stride = dims[2] == 1 ? 0 : dims[3];
    result->col_stride = dims[3] == 1 ? 0 : 1;
  }

  void decode_score_operands() {
    if (present(k_bias, kFeatureBias)) {
      const Element element = operands_.data[k_bias].element;
      if (!to_dtype(element, &problem_.bias_dtype)) {
        return fail("bias: got %s; wanted f32, bf16 or f16", name_of(element));
      }
      score_operand(k_bias, element, &problem_.bias);
    }
    if (present(k_mask, kFeatureMask)) score_operand(k_mask, Element::kBool, &problem_.mask);
  }

  // [Bm] (width = 0) or [Bm, width].
  template <typename T>
  void vector(int number, Feature bit, Element element, i64 width, BatchVector<T>* result) {
    if (!present(number, bit)) return;
    void* const data =
        width == 0 ? operand(number, element, {kAny}) : operand(number, element, {kAny, width});
    if (!ok()) return;
    result->data = static_cast<const T*>(data);
    result->batch = batch_map(number);
    result->stride = width == 0 ? 1 : width;
  }

  // Like `vector`, for a width that may itself be 0.
  void segments(int number, i64 length, BatchVector<i32>* result) {
    if (!present(number, kFeatureSegments)) return;
    result->data = static_cast<const i32*>(operand(number, Element::kInt32, {kAny, length}));
    if (!ok()) return;
    result->batch = batch_map(number);
    result->stride = length;
  }

  void decode_vectors() {
    Problem& p = problem_;
    vector(k_query_lengths, kFeatureQLengths, Element::kInt32, 0, &p.q_lengths);
    vector(k_kv_lengths, kFeatureKvLengths, Element::kInt32, 0, &p.kv_lengths);
    segments(k_query_segments, p.lq, &p.q_segments);
    segments(k_kv_segments, p.lkv, &p.kv_segments);
    vector(k_alibi_slopes, kFeatureAlibi, Element::kFloat32, p.hq, &p.alibi_slopes);
    vector(k_prefix_lengths, kFeaturePrefix, Element::kInt32, 0, &p.prefix_lengths);
    vector(k_scale, kFeatureScaleArray, Element::kFloat32, 0, &p.scale_array);
    vector(k_dropout_seed, kFeatureDropout, Element::kUInt32, 2, &p.dropout.seed);
    vector(k_dropout_batch, kFeatureDropout, Element::kUInt32, 0, &p.dropout.batch_index);
    if (present(k_dropout_head, kFeatureDropout)) {
      p.dropout.head_index =
          static_cast<const u32*>(operand(k_dropout_head, Element::kUInt32, {p.hq}));
    }
  }

  void decode_block_mask() {
    Problem& p = problem_;
    const bool has_index = present(k_block_index, kFeatureBlockMask);
    if (!present(k_block_bits, kFeatureBlockMask) || !has_index) return;
    const i64 rows = ceil_div<i64>(p.lq, kMaskTile), cols = ceil_div<i64>(p.lkv, kMaskTile);
    p.block_mask.index =
        static_cast<const i32*>(operand(k_block_index, Element::kInt32, {kAny, kAny, rows, cols}));
    p.block_mask.bits = static_cast<const u32*>(
        operand(k_block_bits, Element::kUInt32, {kAny, kMaskTile, kMaskTile / 32}));
    if (!ok()) return;
    const i64 heads = operands_.data[k_block_index].dims[1];
    if (heads != 1 && heads != p.hq) {
      return fail("block_index: got %lld heads; wanted 1 or %lld", heads, p.hq);
    }
    p.block_mask.batch = batch_map(k_block_index);
    p.block_mask.batch_stride = heads * rows * cols;
    p.block_mask.head_stride = heads == 1 ? 0 : rows * cols;
    p.block_mask.row_stride = cols;
  }

  BufferList operands_;
  BufferList results_;
  const Attributes& attributes_;
  Problem& problem_;
  Status status_;
};

Tuning tuning_of(const Attributes& a) { return {a.block_q, a.block_k, a.num_splits}; }

}  // namespace

Status decode_forward(BufferList operands, BufferList results, const Attributes& attributes,
                      ForwardArgs* args) {
  Problem& p = args->problem;
  Decoder decoder(operands, results, attributes, &p);
  if (!decoder.counts(kOperandCount, kForwardResultCount)) return decoder.status();
  decoder.decode_problem(results.data[kForwardResult_out]);
  if (!decoder.ok()) return decoder.status();
  args->out = results.data[kForwardResult_out].data;
  args->lse = static_cast<float*>(decoder.exactly("lse", results.data[kForwardResult_lse],
                                                  Element::kFloat32, {p.batch, p.lq, p.hq}));
  decoder.workspace(results.data[kForwardResult_workspace], &args->workspace,
                    &args->workspace_bytes);
  args->tuning = tuning_of(attributes);
  return decoder.status();
}

Status decode_backward(BufferList operands, BufferList results, const Attributes& attributes,
                       BackwardArgs* args) {
  Problem& p = args->problem;
  Decoder decoder(operands, results, attributes, &p);
  if (!decoder.counts(kOperandCount + kBackwardOperandCount, kBackwardResultCount)) {
    return decoder.status();
  }
  const Buffer* const saved = operands.data + kOperandCount;
  decoder.decode_problem(saved[k_out]);
  if (!decoder.ok()) return decoder.status();
  const Element element = to_element(p.dtype);
  const i64 rows[] = {p.batch, p.lq, p.hq};
  args->out = saved[k_out].data;
  args->lse =
      static_cast<const float*>(decoder.exactly("lse", saved[k_lse], Element::kFloat32, rows));
  args->dout = decoder.exactly("dout", saved[k_dout], element, {p.batch, p.lq, p.hq, p.dv});
  args->dlse =
      static_cast<const float*>(decoder.exactly("dlse", saved[k_dlse], Element::kFloat32, rows));

  args->dq =
      decoder.exactly("dq", results.data[kBackwardResult_dq], element, {p.batch, p.lq, p.hq, p.d});
  args->dk = decoder.exactly("dk", results.data[kBackwardResult_dk], element,
                             {p.batch, p.lkv, p.hkv, p.d});
  args->dv = decoder.exactly("dv", results.data[kBackwardResult_dv], element,
                             {p.batch, p.lkv, p.hkv, p.dv});
  const struct {
    Feature want, has;
    const char* name;
  } pairs[] = {{kFeatureWantDbias, kFeatureBias, "dbias"},
               {kFeatureWantDslopes, kFeatureAlibi, "dslopes_rows"},
               {kFeatureWantDscale, kFeatureScaleArray, "dscale_rows"}};
  for (const auto& pair : pairs) {
    if (decoder.feature(pair.want) && !decoder.feature(pair.has)) {
      decoder.fail("%s: asked for without the operand that it belongs to", pair.name);
    }
  }
  const Buffer& bias = operands.data[k_bias];
  i64 bias_dims[4] = {};
  for (int i = 0; i < 4 && i < bias.rank; ++i) bias_dims[i] = bias.dims[i];
  args->dbias = decoder.optional_result("dbias", results.data[kBackwardResult_dbias],
                                        decoder.feature(kFeatureWantDbias), bias_dims);
  args->dslopes_rows =
      decoder.optional_result("dslopes_rows", results.data[kBackwardResult_dslopes_rows],
                              decoder.feature(kFeatureWantDslopes), rows);
  args->dscale_rows =
      decoder.optional_result("dscale_rows", results.data[kBackwardResult_dscale_rows],
                              decoder.feature(kFeatureWantDscale), rows);
  decoder.workspace(results.data[kBackwardResult_workspace], &args->workspace,
                    &args->workspace_bytes);
  args->tuning = tuning_of(attributes);
  return decoder.status();
}

}  // namespace attention::ffi
