// vLLM's and FlashInfer's forms: append and attention over block tensors that the caller owns.

#include <nanobind/stl/string.h>

#include <optional>

#include "bindings.h"
#include "errors.h"
#include "pagedkv/block_arrays.h"
#include "pagedkv/scratch.h"
#include "workers.h"

namespace pagedkv::python {
namespace {

Format format_of(const BlockTensorIn& tensor, const char* name, int64_t head_dim) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return tensor.dtype.code == uint8_t(code) && tensor.dtype.bits == bits;
  };
  const int64_t width = tensor.view.shape[3];
  if (is(Code::Float, 32)) return Format::kF32;
  if (is(Code::Float, 16)) return Format::kF16;
  if (is(Code::Bfloat, 16)) return Format::kBF16;
  if (is(Code::Int, 8)) return Format::kQ8;
  if (is(Code::UInt, 8) && width == (head_dim + 1) / 2) return Format::kQ4;
  if (is(Code::UInt, 8) && width * 4 == head_dim * 3) return Format::kQ6;
  raise_type_error(std::string(name) + " has rows of " + std::to_string(width) +
                   " elements that no format of head_dim " + std::to_string(head_dim) +
                   " has: float32, float16, bfloat16, int8 (q8), or uint8 of head_dim / 2 (q4) or 3/4 (q6)");
}

// The tensors that were handed in, kept alive, and what they mean.
struct ArraysIn {
  BlockTensorIn k, v;
  std::optional<BlockTensorIn> k_scales, v_scales;
  BlockArrays arrays;

  ArraysIn(nb::handle key_cache, nb::handle value_cache, nb::handle key_scales, nb::handle value_scales,
           int64_t head_dim_k, int64_t head_dim_v, bool writable)
      : k(block_tensor_in(key_cache, "key_cache", writable)),
        v(block_tensor_in(value_cache, "value_cache", writable)) {
    const Format k_format = format_of(k, "key_cache", head_dim_k),
                 v_format = format_of(v, "value_cache", head_dim_v);
    arrays.tensors.k = k.view;
    arrays.tensors.v = v.view;
    const auto scales = [&](Format format, nb::handle given, const char* name, std::optional<BlockTensorIn>& kept,
                            TensorView& view) {
      if (!is_quantized(format)) {
        if (!given.is_none())
          raise(invalid_argument(std::string(name) + " are given, but " + format_name(format) + " rows have none"));
        return;
      }
      if (given.is_none())
        raise(invalid_argument(std::string(name) + " are needed: the rows are " + format_name(format)));
      kept.emplace(block_tensor_in(given, name, writable));
      view = kept->view;
    };
    scales(k_format, key_scales, "key_scales", k_scales, arrays.tensors.k_scales);
    scales(v_format, value_scales, "value_scales", v_scales, arrays.tensors.v_scales);
    arrays.shape = {k.view.shape[2], head_dim_k, head_dim_v, {k_format, v_format}};
  }
};

void reshape_and_cache(nb::handle key, nb::handle value, nb::handle key_cache, nb::handle value_cache,
                       nb::handle slot_mapping, nb::handle key_scales, nb::handle value_scales) {
  ArrayCounters& counters = process_counters();
  const IntsIn<int64_t> slots(slot_mapping, "slot_mapping", {kAny});
  // More rows than slots are padding, as in vLLM: the slots count.
  const RowsIn k(key, "key", kAny, kAny, kAny, counters);
  const RowsIn v(value, "value", k.n_tokens(), k.num_heads(), kAny, counters);
  if (k.n_tokens() < slots.size())
    raise(invalid_argument("key has " + std::to_string(k.n_tokens()) + " rows, slot_mapping " +
                           std::to_string(slots.size()) + " slots"));
  const ArraysIn in(key_cache, value_cache, key_scales, value_scales, k.head_dim(), v.head_dim(), true);
  if (in.arrays.shape.num_kv_heads != k.num_heads())
    raise(invalid_argument("key has " + std::to_string(k.num_heads()) + " heads, key_cache " +
                           std::to_string(in.arrays.shape.num_kv_heads)));
  check(without_gil([&] {
    return write_slots(in.arrays, k.rows(), v.rows(), {slots.data(), size_t(slots.size())});
  }));
}

// Tables of either form as vLLM's.
struct TablesIn {
  std::optional<IntsIn<int32_t>> tables, lengths, starts;
  std::vector<int32_t> made_tables, made_lengths, made_starts;
  BlockTables view;

  TablesIn(nb::handle block_tables, nb::handle seq_lens, nb::handle cu_seqlens_q, nb::handle kv_indptr,
           nb::handle kv_indices, nb::handle kv_last_page_len, int64_t n_tokens, int64_t block_size) {
    const bool flat = !kv_indptr.is_none() || !kv_indices.is_none() || !kv_last_page_len.is_none();
    if (flat == (!block_tables.is_none() || !seq_lens.is_none()))
      raise(
          invalid_argument("give either block_tables and seq_lens, or kv_indptr, kv_indices and kv_last_page_len"));
    if (flat)
      from_flat(kv_indptr, kv_indices, kv_last_page_len, block_size);
    else
      from_tables(block_tables, seq_lens);
    take_starts(cu_seqlens_q, n_tokens);
    for (int64_t s = 0; s < view.n_sequences; ++s)
      if (const int64_t n = int64_t(view.query_start_loc[s + 1]) - view.query_start_loc[s];
          view.seq_lens[s] > 0 && n > view.seq_lens[s])  // of none at all, queries read zeros
        raise(invalid_argument("sequence " + std::to_string(s) + " has " + std::to_string(n) + " queries and " +
                               std::to_string(view.seq_lens[s]) + " keys, which include the queries' own"));
  }

 private:
  void take_starts(nb::handle cu_seqlens_q, int64_t n_tokens) {
    if (cu_seqlens_q.is_none()) {
      if (n_tokens != view.n_sequences)
        raise(invalid_argument("query has " + std::to_string(n_tokens) + " rows, the tables " +
                               std::to_string(view.n_sequences) + " sequences: cu_seqlens_q is needed"));
      for (int64_t s = 0; s <= view.n_sequences; ++s) made_starts.push_back(int32_t(s));
      view.query_start_loc = made_starts.data();
      return;
    }
    starts.emplace(cu_seqlens_q, "cu_seqlens_q", Extents{view.n_sequences + 1});
    if (starts->data()[0] != 0 || starts->data()[view.n_sequences] != n_tokens)
      raise(invalid_argument("cu_seqlens_q runs from " + std::to_string(starts->data()[0]) + " to " +
                             std::to_string(starts->data()[view.n_sequences]) + ", query has rows 0 to " +
                             std::to_string(n_tokens)));
    view.query_start_loc = starts->data();
  }
  void from_tables(nb::handle block_tables, nb::handle seq_lens) {
    if (block_tables.is_none() || seq_lens.is_none())
      raise(invalid_argument("block_tables and seq_lens go together: one is missing"));
    lengths.emplace(seq_lens, "seq_lens", Extents{kAny});
    tables.emplace(block_tables, "block_tables", Extents{lengths->size(), kAny});
    view = {.n_sequences = lengths->size(),
            .max_blocks = tables->extent(1),
            .block_tables = tables->data(),
            .seq_lens = lengths->data()};
  }
  void from_flat(nb::handle kv_indptr, nb::handle kv_indices, nb::handle kv_last_page_len, int64_t block_size) {
    if (kv_indptr.is_none() || kv_indices.is_none() || kv_last_page_len.is_none())
      raise(invalid_argument("kv_indptr, kv_indices and kv_last_page_len go together: one is missing"));
    const IntsIn<int32_t> last(kv_last_page_len, "kv_last_page_len", {kAny});
    const IntsIn<int32_t> indptr(kv_indptr, "kv_indptr", {last.size() + 1});
    const IntsIn<int32_t> indices(kv_indices, "kv_indices", {kAny});
    const int64_t n = last.size();
    int64_t widest = 0;
    for (int64_t s = 0; s < n; ++s) {
      const int64_t begin = indptr.data()[s], end = indptr.data()[s + 1];
      if (begin < 0 || end < begin || end > indices.size())
        raise(invalid_argument("kv_indptr[" + std::to_string(s) + ":" + std::to_string(s + 2) + "] is " +
                               std::to_string(begin) + ", " + std::to_string(end) + ", kv_indices has " +
                               std::to_string(indices.size())));
      const int64_t tail = last.data()[s];
      if (end > begin ? tail < 1 || tail > block_size : tail != 0)
        raise(invalid_argument("kv_last_page_len[" + std::to_string(s) + "] is " + std::to_string(tail) +
                               ", allowed are 1 to " + std::to_string(block_size) + ", or 0 without blocks"));
      made_lengths.push_back(int32_t(end > begin ? (end - begin - 1) * block_size + tail : 0));
      widest = std::max(widest, end - begin);
    }
    made_tables.assign(size_t(n * widest), -1);
    for (int64_t s = 0; s < n; ++s)
      std::copy(indices.data() + indptr.data()[s], indices.data() + indptr.data()[s + 1],
                made_tables.begin() + s * widest);
    view = {.n_sequences = n,
            .max_blocks = widest,
            .block_tables = made_tables.data(),
            .seq_lens = made_lengths.data()};
  }
};

struct AttentionOptions {
  Scale scale;
  nb::object key_scales = nb::none(), value_scales = nb::none();
  nb::object kv_indptr = nb::none(), kv_indices = nb::none(), kv_last_page_len = nb::none();
  std::optional<int64_t> head_dim_v;
  float softcap = 0;
  Window sliding_window;
  nb::object sinks = nb::none(), out = nb::none();
  bool return_lse = false;
  QueryPath query_path = QueryPath::kAuto;
};
constexpr Field<AttentionOptions> kAttentionFields[] = {
    {"scale", &field<&AttentionOptions::scale>},
    {"key_scales", &field<&AttentionOptions::key_scales>},
    {"value_scales", &field<&AttentionOptions::value_scales>},
    {"kv_indptr", &field<&AttentionOptions::kv_indptr>},
    {"kv_indices", &field<&AttentionOptions::kv_indices>},
    {"kv_last_page_len", &field<&AttentionOptions::kv_last_page_len>},
    {"head_dim_v", &field<&AttentionOptions::head_dim_v>},
    {"softcap", &field<&AttentionOptions::softcap>},
    {"sliding_window", &field<&AttentionOptions::sliding_window>},
    {"sinks", &field<&AttentionOptions::sinks>},
    {"out", &field<&AttentionOptions::out>},
    {"return_lse", &field<&AttentionOptions::return_lse>},
    {"query_path", &field<&AttentionOptions::query_path>},
};

nb::object paged_attention(nb::handle query, nb::handle key_cache, nb::handle value_cache, nb::handle block_tables,
                           nb::handle seq_lens, nb::handle cu_seqlens_q, const nb::kwargs& given) {
  AttentionOptions asked;
  read_options("paged_attention", given, kAttentionFields, asked);
  ArrayCounters& counters = process_counters();
  const FloatsIn q(query, "query", {kAny, kAny, kAny}, counters);
  const int64_t n = q.array().extent(0), heads = q.array().extent(1), head_dim = q.array().extent(2);
  const int64_t v_dim = asked.head_dim_v.value_or(head_dim);
  const ArraysIn in(key_cache, value_cache, asked.key_scales, asked.value_scales, head_dim, v_dim, false);
  const TablesIn tables(block_tables, seq_lens, cu_seqlens_q, asked.kv_indptr, asked.kv_indices,
                        asked.kv_last_page_len, n, in.arrays.tensors.k.shape[1]);
  FloatsOut result({n, heads, v_dim}, q.array(), asked.out, "out", counters);
  std::optional<FloatsIn> sink_logits;
  if (!asked.sinks.is_none()) sink_logits.emplace(asked.sinks, "sinks", Extents{heads}, counters);
  auto lse = std::unique_ptr<float[]>(asked.return_lse ? new float[size_t(n * heads + 1)] : nullptr);
  BlockAttentionOptions options{
      .num_q_heads = heads, .sliding_window = asked.sliding_window.keys, .query_path = asked.query_path};
  BlockAttention::Args args{.q = q.data(),
                            .out = result.data(),
                            .lse = lse.get(),
                            .scale = asked.scale.factor,
                            .softcap = asked.softcap,
                            .sinks = sink_logits ? sink_logits->data() : nullptr};
  check(without_gil([&]() -> Status {
    auto plan = BlockAttention::plan(in.arrays, tables.view, options);
    if (!plan.ok()) return plan.status();
    const size_t n_sequences = size_t(tables.view.n_sequences);
    const int parts = attention_parts({tables.view.query_start_loc, n_sequences + 1},
                                      {tables.view.seq_lens, n_sequences}, heads * (head_dim + v_dim));
    thread_local Scratch memory;
    const auto scratch = memory.get(plan->scratch_bytes(parts));
    if (!scratch.ok()) return scratch.status();
    args.scratch = *scratch;
    Status status = run_parts(parts, [&](int part) { return plan->attend(args, {part, parts}); });
    return status.ok() ? plan->merge(args) : status;
  }));
  nb::object made = result.finish();
  if (!asked.return_lse) return made;
  return nb::make_tuple(made, float_array(q.array().framework(), std::move(lse), {n, heads}));
}

}  // namespace

void bind_block_arrays(nb::module_& m) {
  m.def("reshape_and_cache", &reshape_and_cache, nb::arg("key").none(), nb::arg("value").none(),
        nb::arg("key_cache").none(), nb::arg("value_cache").none(), nb::arg("slot_mapping").none(), nb::kw_only(),
        nb::arg("key_scales") = nb::none(), nb::arg("value_scales") = nb::none(),
        "Writes rows into the slots of block tensors that the caller owns (vLLM's function of that name).\n\n"
        "  key, value               [n_tokens, num_kv_heads, head_dim]; rows past slot_mapping's are padding\n"
        "  key_cache, value_cache   [num_blocks, block_size, num_kv_heads, width], any strides, last axis "
        "contiguous:\n"
        "                           float32, float16, bfloat16, int8 (q8), uint8 (q4: head_dim / 2, q6: 3/4)\n"
        "  slot_mapping             int64 [n_tokens], block * block_size + offset; -1 skips\n"
        "  key_scales, value_scales float32 [num_blocks, block_size, num_kv_heads, 1] of quantized tensors\n\n"
        "Errors: ValueError (shapes, a slot that is not there: nothing was written), NotFiniteError.");
  m.def("paged_attention", &paged_attention, nb::arg("query").none(), nb::arg("key_cache").none(),
        nb::arg("value_cache").none(), nb::arg("block_tables") = nb::none(), nb::arg("seq_lens") = nb::none(),
        nb::arg("cu_seqlens_q") = nb::none(), nb::arg("options"),
        nb::sig("def paged_attention(query: object, key_cache: object, value_cache: object, "
                "block_tables: object | None = None, seq_lens: object | None = None, "
                "cu_seqlens_q: object | None = None, *, scale: float | None = None, "
                "key_scales: object | None = None, value_scales: object | None = None, "
                "kv_indptr: object | None = None, kv_indices: object | None = None, "
                "kv_last_page_len: object | None = None, head_dim_v: int | None = None, softcap: float = 0.0, "
                "sliding_window: int | None = None, sinks: object | None = None, out: object | None = None, "
                "return_lse: bool = False, query_path: str = 'auto') -> typing.Any"),
        "Causal attention over block tensors that the caller owns.\n\n"
        "  query         [n_tokens, num_q_heads, head_dim]\n"
        "  block_tables  int32 [num_seqs, max_blocks]; seq_lens int32 [num_seqs], the queries' tokens included "
        "(vLLM)\n"
        "  kv_indptr     int32 [num_seqs + 1], kv_indices int32 [...], kv_last_page_len int32 [num_seqs]: the same "
        "in\n"
        "                FlashInfer's form; give one of the two\n"
        "  cu_seqlens_q  int32 [num_seqs + 1]: which rows of query are whose; None: one each\n"
        "  scale         None: 1/sqrt(head_dim)\n"
        "  returns       [n_tokens, num_q_heads, head_dim_v] of query's framework and type; with return_lse also\n"
        "                lse [n_tokens, num_q_heads]\n\n"
        "Errors: ValueError that names the sequence and place of a block id out of range, TypeError.");
}

}  // namespace pagedkv::python
