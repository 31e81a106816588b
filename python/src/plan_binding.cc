// StepPlan, and what is done over one: append, attend, dense reads.

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "cache.h"
#include "workers.h"

namespace pagedkv::python {
namespace {

struct PairIn {
  PySequence sequence;
  nb::object value;
};
std::vector<PairIn> pairs_of(nb::handle requests, const char* what) {
  std::vector<PairIn> out;
  if (!nb::isinstance<nb::sequence>(requests))
    refuse_type({"requests", requests}, ("lists of (sequence, " + std::string(what) + ") pairs").c_str());
  for (const nb::handle item : nb::borrow(requests)) {
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 2 || !nb::isinstance<PySequence>(item[0]))
      raise_type_error(std::string("a request is a pair (sequence, ") + what + ")");
    out.push_back({nb::cast<PySequence>(item[0]), nb::object(item[1])});
  }
  return out;
}

// What a layer's slots held before would become the sequences' own. Requires: the lock.
Status check_written(const PyPlan& plan) {
  for (size_t layer = 0; layer < plan.written.size(); ++layer)
    if (!plan.written[layer] && plan.cache->group_of_layer[layer] >= 0)
      return invalid_argument("layer " + std::to_string(layer) +
                              " got no rows in this step: append them, or abandon the step");
  return Status();
}

void commit(PyPlan& plan, nb::handle accepted, Given<bool> given) {
  const bool all_or_none = given.read_as("all_or_none");
  if (plan.reads_only) raise(invalid_argument("the plan only reads: there is nothing to commit"));
  std::vector<Tokens> counts;
  if (!accepted.is_none()) {
    const IntsIn<int64_t> given(accepted, "accepted", {kAny});
    for (int64_t i = 0; i < given.size(); ++i) counts.emplace_back(given.data()[i]);
    if (counts.empty() && plan.n_sequences > 0) raise(invalid_argument("accepted is empty"));
  }
  Result<std::vector<Status>> statuses = locked(*plan.cache, [&]() -> Result<std::vector<Status>> {
    if (Status status = plan.usable(); !status.ok()) return status;
    const bool grows = std::any_of(counts.begin(), counts.end(), [](Tokens count) { return count.n > 0; });
    if (Status status = check_written(plan); (counts.empty() || grows) && !status.ok()) return status;
    if (all_or_none) {
      auto faults = plan.cache->cache->faults(*plan.plan);
      if (!faults.ok()) return faults;
      for (const Status& status : *faults)
        if (!status.ok()) {
          plan.plan.reset();
          return status;
        }
    }
    auto ended = plan.cache->cache->commit(std::move(*plan.plan), counts);
    if (ended.ok()) plan.plan.reset();
    return ended;
  });
  for (const Status& status : check(std::move(statuses))) check(status);
}

void abandon(PyPlan& plan) {
  if (plan.reads_only) return;
  locked(*plan.cache, [&] { plan.plan.reset(); });
}

// One of a plan's arrays as numpy's, copied: the plan's own are filled again by the next step. No shape: as long as
// it is.
template <class Int, class F>
nb::any ints(PyPlan& plan, std::vector<int64_t> shape, const F& array_of) {
  std::vector<std::byte> bytes;
  check(locked(*plan.cache, [&]() -> Status {
    if (!plan.plan) return plan.usable();
    const std::span<const Int> values = array_of(*plan.plan);
    bytes.resize(values.size_bytes());
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    if (shape.empty()) shape = {int64_t(values.size())};
    return Status();
  }));
  return nb::borrow<nb::any>(byte_array(Framework::kNumpy, std::move(bytes), shape,
                                        {uint8_t(nb::dlpack::dtype_code::Int), uint8_t(8 * sizeof(Int)), 1}));
}

nb::any block_tables(PyPlan& plan, Given<int> given) {
  const int group = given.read_as("group");
  plan.cache->check_group(group);
  int64_t width = 0;
  check(locked(*plan.cache, [&]() -> Status {
    if (!plan.plan) return plan.usable();
    width = plan.plan->group(group).max_blocks;
    return Status();
  }));
  return ints<int32_t>(plan, {plan.n_sequences, width},
                       [&](const StepPlan& step) { return step.group(group).block_tables; });
}

nb::any slot_mapping(PyPlan& plan, Given<int> given) {
  const int group = given.read_as("group");
  plan.cache->check_group(group);
  const auto& layers = plan.cache->cache->options().groups[size_t(group)].layers;
  return ints<int64_t>(plan, {}, [&](const StepPlan& step) {
    for (const int layer : layers) plan.written[size_t(layer)] = true;
    return step.group(group).slot_mapping;
  });
}

// --- append and attend ---------------------------------------------------------------------------------------

void append(Given<PyPlan*> in, Given<int> at, nb::handle k, nb::handle v) {
  PyPlan& plan = *in.read_as("plan");
  const int layer = at.read_as("layer");
  PyCache& cache = *plan.cache;
  const LayerShape& shape = cache.group(layer).shape;
  const int64_t n = plan.n_tokens;
  const RowsIn keys(k, "k", n, shape.num_kv_heads, shape.head_dim_k, cache.arrays);
  const RowsIn values(v, "v", n, shape.num_kv_heads, shape.head_dim_v, cache.arrays);
  const int64_t work = n * shape.num_kv_heads * (shape.head_dim_k + shape.head_dim_v) * 8;
  check(locked(cache, [&]() -> Status {
    if (Status status = plan.usable(); !status.ok() || n == 0) return status;
    const int parts = parts_for(work);
    Status status = run_parts(parts, [&](int part) {
      return cache.cache->append(*plan.plan, layer, keys.rows(), values.rows(), {part, parts});
    });
    if (status.ok()) plan.written[size_t(layer)] = true;
    return status;
  }));
}

struct AttendOptions {
  nb::object out = nb::none(), sinks = nb::none();
  Scale scale;
  float softcap = 0;
  Window sliding_window;
  bool return_lse = false;
};
constexpr Field<AttendOptions> kAttendFields[] = {
    {"out", &field<&AttendOptions::out>},         {"scale", &field<&AttendOptions::scale>},
    {"softcap", &field<&AttendOptions::softcap>}, {"sliding_window", &field<&AttendOptions::sliding_window>},
    {"sinks", &field<&AttendOptions::sinks>},     {"return_lse", &field<&AttendOptions::return_lse>},
};

// The checks of attend that need no plan, for attention that is computed elsewhere.
void check_attention(nb::handle q, const nb::kwargs& given) {
  AttendOptions options;
  read_options("attend", given, kAttendFields, options);
  if (!(options.softcap >= 0) || !std::isfinite(options.softcap))
    raise(invalid_argument("softcap is " + std::to_string(options.softcap) + ", it must be finite, 0 or more"));
  if (const InArray queries(q, "q"); !queries.is_double()) (void)queries.element_type();
}

nb::object attend(Given<PyPlan*> in, Given<int> at, nb::handle q, const nb::kwargs& given) {
  PyPlan& plan = *in.read_as("plan");
  const int layer = at.read_as("layer");
  AttendOptions options;
  read_options("attend", given, kAttendFields, options);
  PyCache& cache = *plan.cache;
  const GroupSpec& group = cache.group(layer);
  const int64_t n = plan.n_tokens;
  const QueriesIn queries(q, n, kAny, group.shape.head_dim_k, cache.arrays);
  const int64_t heads = queries.shape().num_heads;
  FloatsOut result(queries.shape(), group.shape.head_dim_v, queries.array(), options.out, "out", cache.arrays);
  std::optional<FloatsIn> sink_logits;
  if (!options.sinks.is_none()) sink_logits.emplace(options.sinks, "sinks", Extents{heads}, cache.arrays);
  auto lse = std::unique_ptr<float[]>(options.return_lse ? new float[size_t(n * heads + 1)] : nullptr);
  check(locked(cache, [&]() -> Status {
    if (Status status = plan.usable(); !status.ok() || n == 0) return status;
    const StepPlan& step = *plan.plan;
    AttendArgs args{.plan = step,
                    .layer = layer,
                    .num_q_heads = heads,
                    .q = queries.data(),
                    .q_token_stride = queries.token_stride(),
                    .out = result.data(),
                    .lse = lse.get(),
                    .scale = options.scale.factor,
                    .softcap = options.softcap,
                    .sliding_window = options.sliding_window.keys,
                    .sinks = sink_logits ? sink_logits->data() : nullptr};
    const int parts = attention_parts(step.query_start_loc(), step.seq_lens(),
                                      heads * (group.shape.head_dim_k + group.shape.head_dim_v));
    const auto scratch = cache.scratch.get(cache.cache->scratch_bytes(step, parts, heads));
    if (!scratch.ok()) return scratch.status();
    args.scratch = *scratch;
    Status status = run_parts(parts, [&](int part) { return cache.cache->attend(args, {part, parts}); });
    return status.ok() ? cache.cache->merge(args) : status;
  }));
  nb::object made = result.finish();
  if (!options.return_lse) return made;
  return nb::make_tuple(made, float_array(queries.array().framework(), std::move(lse), {n, heads}));
}

}  // namespace

PyPlan reserve(const CachePtr& self, nb::handle requests) {
  const std::vector<PairIn> pairs = pairs_of(requests, "n_tokens or token ids");
  std::vector<std::unique_ptr<IntsIn<int32_t>>> ids;
  std::vector<StepRequest> asked;
  for (const PairIn& pair : pairs) {
    StepRequest request{.sequence = id_of(*self, pair.sequence), .tokens = {}};
    int64_t n_tokens = 0;
    if (nb::isinstance<nb::int_>(pair.value)) {
      if (!nb::try_cast(pair.value, n_tokens) || n_tokens < 1)
        raise(invalid_argument("a request has " + nb::cast<std::string>(nb::str(pair.value)) +
                               " tokens, at least 1 is needed"));
      request.n_tokens = Tokens(n_tokens);
    } else {
      ids.push_back(std::make_unique<IntsIn<int32_t>>(pair.value, "token ids", Extents{kAny}));
      if (ids.back()->size() == 0) raise(invalid_argument("a request has 0 tokens, at least 1 is needed"));
      request.tokens = {ids.back()->data(), size_t(ids.back()->size())};
    }
    asked.push_back(request);
  }
  return {self, check(locked(*self, [&] { return self->cache->reserve(asked); })), false};
}

PyPlan plan_read(const CachePtr& self, nb::handle requests) {
  std::vector<ReadRequest> asked;
  for (const PairIn& pair : pairs_of(requests, "n_queries")) {
    int64_t n_queries = 0;
    read({"n_queries", pair.value}, n_queries);
    asked.push_back({id_of(*self, pair.sequence), Tokens(n_queries)});
  }
  return {self, check(locked(*self, [&] { return self->cache->plan_read(asked); })), true};
}

Pair read_dense(PyCache& cache, Given<PyPlan*> in, Given<int64_t> given_place, Given<int> given_layer,
                Given<int64_t> given_first, nb::handle out_k, nb::handle out_v) {
  PyPlan& plan = *in.read_as("plan");
  const int layer = given_layer.read_as("layer");
  const int64_t place = given_place.read_as("place"), first = given_first.read_as("first");
  const LayerShape& shape = cache.group(layer).shape;
  if (plan.cache.get() != &cache) raise(invalid_argument("the plan is of another cache"));
  if (place < 0 || place >= plan.n_sequences)
    raise(invalid_argument("place is " + std::to_string(place) + ", the plan has " +
                           std::to_string(plan.n_sequences) + " sequences"));
  const int64_t length = check(locked(cache, [&]() -> Result<int64_t> {
    if (Status status = plan.usable(); !status.ok()) return status;
    return int64_t(plan.plan->seq_lens()[size_t(place)]);
  }));
  const int64_t n = length - first;
  if (first < 0 || n < 0)
    raise(invalid_argument("first is " + std::to_string(first) + ", the sequence has " + std::to_string(length) +
                           " tokens"));
  struct Target {
    std::unique_ptr<float[]> owned;
    nb::ndarray<> given;  // of no type: a typed one would be converted, and the copy filled
    Cache::DenseRows rows;
  };
  const auto target = [&](nb::handle out, const char* name, int64_t head_dim) {
    Target t;
    if (out.is_none()) {
      t.owned.reset(new float[size_t(shape.num_kv_heads * n * head_dim + 1)]);
      t.rows = {.data = t.owned.get(), .token_stride = head_dim, .head_stride = n * head_dim};
      return t;
    }
    const InArray seen(out, name, {shape.num_kv_heads, n, head_dim});
    if (!nb::try_cast(nb::borrow(out), t.given) || !t.given.is_valid() || t.given.dtype() != nb::dtype<float>() ||
        (head_dim > 1 && t.given.stride(2) != 1))
      raise_type_error(std::string(name) + " must be a writable float32 array, its last dimension contiguous");
    t.rows = {.data = static_cast<float*>(t.given.data()),
              .token_stride = t.given.stride(1),
              .head_stride = t.given.stride(0)};
    return t;
  };
  Target k = target(out_k, "out_k", shape.head_dim_k), v = target(out_v, "out_v", shape.head_dim_v);
  check(locked(cache, [&]() -> Status {
    if (Status status = plan.usable(); !status.ok()) return status;
    return cache.cache->read_dense(*plan.plan, place, layer, Tokens(first), k.rows, v.rows);
  }));
  const auto finish = [&](Target& t, nb::handle out, int64_t head_dim) -> nb::object {
    if (!out.is_none()) return nb::borrow(out);
    return float_array(Framework::kNumpy, std::move(t.owned), {shape.num_kv_heads, n, head_dim});
  };
  return nb::make_tuple(finish(k, out_k, shape.head_dim_k), finish(v, out_v, shape.head_dim_v));
}

int parts_for(int64_t products) {
  constexpr int64_t kWorthAThread = 1 << 20;  // about 30 us, twice what waking one costs
  const int64_t most = products / kWorthAThread;
  return most <= 1 ? 1 : int(std::min<int64_t>(most, num_threads()));
}

int attention_parts(std::span<const int32_t> query_start_loc, std::span<const int32_t> seq_lens,
                    int64_t products_a_key) {
  int64_t pairs = 0;
  for (size_t s = 0; s < seq_lens.size(); ++s)
    pairs += int64_t(query_start_loc[s + 1] - query_start_loc[s]) * seq_lens[s];
  return parts_for(pairs * products_a_key);
}

void read(const Argument& argument, PyPlan*& into) {
  if (!nb::try_cast(argument.value, into, false) || into == nullptr)
    refuse_type(argument, "what reserve and plan_read return");
}

void read(const Argument& argument, Scale& into) {
  if (argument.value.is_none()) {
    into.factor = 0;
    return;
  }
  into.factor = float(number(argument));
  if (!(into.factor > 0) || !std::isfinite(into.factor))
    raise(invalid_argument("scale is " + nb::cast<std::string>(nb::str(argument.value)) +
                           ", it must be finite and above 0"));
}

void read(const Argument& argument, Window& into) {
  into.keys = argument.value.is_none() ? 0 : whole(argument);
  if (into.keys == -1 || argument.value.is_none())
    into.keys = 0;
  else if (into.keys < 1)
    raise(invalid_argument("sliding_window is " + std::to_string(into.keys) +
                           ", allowed are 1 and more, -1 or None for none"));
}

// A list, as long as what it binds. NOLINTNEXTLINE(readability-function-size)
void bind_plans(nb::module_& m) {
  nb::class_<PyPlan>(
      m, "StepPlan",
      "The read-only description of one step. As a context manager it commits at the end, and abandons "
      "when an exception leaves the block.")
      .def("commit", &commit, nb::arg("accepted") = nb::none(), nb::kw_only(),
           nb::arg("all_or_none").none() = false,
           nb::sig("def commit(self, accepted: object | None = None, *, all_or_none: bool = False) -> None"),
           "Ends the step: each sequence grows by its accepted tokens (default: all).\n\n"
           "Every layer must have got its rows, by append, or by whoever asked for slot_mapping: ValueError.\n"
           "Errors: NotFiniteError, StaleError for the first sequence that was rejected; the others are committed, "
           "unless\n"
           "all_or_none: then NaN or infinity in one abandons the step for all.")
      .def("abandon", &abandon, "Ends the step without accepting anything.")
      .def("__reduce__",
           [](nb::handle) { raise_type_error("[StepPlan] a step is not pickled: it is of one cache's"); })
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> StepPlan"))
      .def(
          "__exit__",
          [](PyPlan& plan, nb::handle type, nb::handle, nb::handle) {
            if (plan.reads_only || !locked(*plan.cache, [&] { return plan.plan.has_value(); })) return;
            const Status written = locked(*plan.cache, [&] { return check_written(plan); });
            if (type.is_none() && written.ok()) return commit(plan, nb::none(), {Py_False});
            abandon(plan);
            if (type.is_none()) check(written);
          },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none())
      .def_ro("n_sequences", &PyPlan::n_sequences)
      .def_ro("n_tokens", &PyPlan::n_tokens)
      .def_prop_ro(
          "open", [](PyPlan& p) { return locked(*p.cache, [&] { return p.plan.has_value(); }); },
          "False once committed or abandoned.")
      .def_prop_ro(
          "seq_lens",
          [](PyPlan& p) {
            return ints<int32_t>(p, {p.n_sequences}, [](const StepPlan& s) { return s.seq_lens(); });
          },
          "int32 [n_sequences], lengths after the new tokens.")
      .def_prop_ro(
          "query_start_loc",
          [](PyPlan& p) {
            return ints<int32_t>(p, {p.n_sequences + 1}, [](const StepPlan& s) { return s.query_start_loc(); });
          },
          "int32 [n_sequences + 1]: which tokens are whose.")
      .def_prop_ro(
          "positions",
          [](PyPlan& p) { return ints<int32_t>(p, {p.n_tokens}, [](const StepPlan& s) { return s.positions(); }); },
          "int32 [n_tokens], the position of each token in its sequence.")
      .def("block_tables", &block_tables, nb::arg("group").none() = 0,
           nb::sig("def block_tables(self, group: int = 0) -> typing.Any"),
           "int32 [n_sequences, max_blocks], -1 where nothing is held.")
      .def("slot_mapping", &slot_mapping, nb::arg("group").none() = 0,
           nb::sig("def slot_mapping(self, group: int = 0) -> typing.Any"),
           "int64 [n_tokens], the slot of each new token, for those who write rows themselves; empty for a plan "
           "that only reads.");

  m.def("check_attention", &check_attention, nb::arg("q"), nb::arg("options"));
  m.def("append", &append, nb::arg("plan").none(), nb::arg("layer").none(), nb::arg("k").none(),
        nb::arg("v").none(), nb::sig("def append(plan: StepPlan, layer: int, k: object, v: object) -> None"),
        "Writes a step's new rows of one layer into their slots, quantizing if the group does.\n\n"
        "  k, v  [plan.n_tokens, num_kv_heads, head_dim], or with a batch [batch, num_kv_heads, n, head_dim] of\n"
        "        batch * n = plan.n_tokens; float32, float16 or bfloat16; K already rotated\n\n"
        "NaN and infinity are reported by commit. Errors: ValueError (shapes), TypeError (dtype), StaleError.\n"
        "Source: PagedAttention, arXiv 2309.06180, section 4.1.");
  m.def(
      "attend", &attend, nb::arg("plan").none(), nb::arg("layer").none(), nb::arg("q").none(), nb::arg("options"),
      nb::sig("def attend(plan: StepPlan, layer: int, q: object, *, out: object | None = None, "
              "scale: float | None = None, softcap: float = 0.0, sliding_window: int | None = None, "
              "sinks: object | None = None, return_lse: bool = False) -> typing.Any"),
      "Attention of a plan's queries over everything stored for their sequences, this step's rows included.\n\n"
      "  q        [plan.n_tokens, num_q_heads, head_dim], or with a batch [batch, num_q_heads, n, head_dim]; "
      "float32\n"
      "           with dense heads is read in place\n"
      "  out      an array of the result's shape to be filled, or None\n"
      "  scale    multiplies q.k; None: 1/sqrt(head_dim)\n"
      "  sinks    [num_q_heads] logits that join each row's denominator once\n"
      "  returns  out [plan.n_tokens, num_q_heads, head_dim_v] (with a batch: [batch, num_q_heads, n, "
      "head_dim_v],\n"
      "           a view of that) of q's framework and type; with return_lse also\n"
      "           lse [plan.n_tokens, num_q_heads] float32, natural logarithm\n\n"
      "Causal, aligned to each sequence's end. Packed blocks are read as they are. Errors: ValueError, TypeError,\n"
      "StaleError.");
  m.def("num_threads", &num_threads,
        "Threads that attention may take; not set, those of torch's team where torch is loaded, else the CPUs of "
        "this\n"
        "process.");
  m.def(
      "set_num_threads",
      [](Given<int> given) {
        const int n = given.read_as("num_threads");
        if (n < 1 || n > 1024)
          raise(invalid_argument("num_threads is " + std::to_string(n) + ", allowed are 1 to 1024"));
        set_num_threads(n);
      },
      nb::arg("n").none(), nb::sig("def set_num_threads(n: int) -> None"));
  m.def(
      "array_stats", [] { return to_dict(process_counters()); },
      "How arrays of the functions that belong to no cache crossed the border.");
}

}  // namespace pagedkv::python
