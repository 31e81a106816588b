// Cache, Sequence, StepPlan, and the functions over a plan: append, attend.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cmath>
#include <mutex>
#include <optional>

#include "bindings.h"
#include "errors.h"
#include "pagedkv/cache.h"
#include "pagedkv/paged_kv_cache.h"
#include "workers.h"

namespace pagedkv::python {
namespace {

// A cache and what Python needs beside it. Everything below `mutex` is touched with it held, and it is only ever
// taken without the GIL: threads take turns, and none waits for the other with a lock in hand.
struct PyCache {
  std::mutex mutex;
  std::unique_ptr<Cache> cache;
  Scratch scratch;
  std::vector<uint64_t> changes;  // by sequence index: how often what a read plan may see has changed
  // Set at creation.
  std::vector<int> group_of_layer;  // -1: no such layer
  // With the GIL.
  ArrayCounters arrays;

  const GroupSpec& group(int layer) const {
    if (layer < 0 || size_t(layer) >= group_of_layer.size() || group_of_layer[size_t(layer)] < 0)
      raise(invalid_argument("layer " + std::to_string(layer) + " is in no group of this cache"));
    return cache->options().groups[size_t(group_of_layer[size_t(layer)])];
  }
  void changed(uint32_t index) {
    if (changes.size() <= index) changes.resize(size_t(index) + 1);
    ++changes[index];
  }
  uint64_t change_of(uint32_t index) const { return index < changes.size() ? changes[index] : 0; }
};
using CachePtr = std::shared_ptr<PyCache>;

template <class F>
auto locked(PyCache& cache, const F& f) {
  const nb::gil_scoped_release release;
  const std::scoped_lock lock(cache.mutex);
  return f();
}

struct PySequence {
  const PyCache* owner = nullptr;
  SequenceId id;
  bool operator==(const PySequence&) const = default;
};

SequenceId id_of(const PyCache& cache, const PySequence& sequence) {
  if (sequence.owner != &cache) raise(invalid_argument("the sequence is of another cache"));
  return sequence.id;
}

struct PyPlan {
  CachePtr cache;
  std::optional<StepPlan> plan;
  bool reads_only = false;
  int64_t num_q_heads = 0;  // of a read plan made for others than the group's; 0: the group's
  std::vector<std::pair<uint32_t, uint64_t>> seen;  // sequence index and its changes when the plan was made

  PyPlan(CachePtr owner, StepPlan made, bool reads)
      : cache(std::move(owner)), plan(std::move(made)), reads_only(reads) {}
  PyPlan(PyPlan&&) = default;
  ~PyPlan() {
    if (cache != nullptr && plan && !reads_only)
      locked(*cache, [&] {
        cache->cache->abandon(*plan);
        cache->cache->recycle(std::move(*plan));
      });
  }

  // Requires: the cache's lock. kStale when what a read plan saw has changed or a step has ended.
  Status usable() const {
    if (!plan) return Status(Code::kStale, "the plan's step has ended");
    for (const auto& [index, change] : seen)
      if (cache->change_of(index) != change)
        return Status(Code::kStale, "a sequence of the plan has changed since it was made: make a new one");
    return Status();
  }
  StepPlan& get() {
    if (!plan) raise(Status(Code::kStale, "the plan's step has ended"));
    return *plan;
  }
  // Ends a step. Requires: the lock.
  void end() {
    for (const auto& [index, change] : ids) cache->changed(index);
    cache->cache->recycle(std::move(*plan));
    plan.reset();
  }
  std::vector<std::pair<uint32_t, uint64_t>> ids;  // of a step
};

LayerShape shape_of(int64_t num_kv_heads, int64_t head_dim, nb::handle head_dim_v, nb::handle kv_quant) {
  KvQuantConfig formats;
  if (kv_quant.is_none()) {
    formats = check(kv_quant_from_env());
  } else {
    const nb::object mode = nb::getattr(kv_quant, "mode", kv_quant);
    if (!nb::isinstance<nb::str>(mode)) raise_type_error("kv_quant is neither a mode nor a PagedKVQuantConfig");
    formats = check(parse_kv_quant(nb::cast<std::string>(mode)));
  }
  return {num_kv_heads, head_dim, head_dim_v.is_none() ? head_dim : nb::cast<int64_t>(head_dim_v), formats};
}

GroupSpec make_group(std::vector<int> layers, int64_t num_kv_heads, int64_t head_dim, nb::handle head_dim_v,
                     int64_t num_q_heads, int64_t sliding_window, nb::handle kv_quant) {
  return {.shape = shape_of(num_kv_heads, head_dim, head_dim_v, kv_quant),
          .num_q_heads = num_q_heads,
          .sliding_window = sliding_window,
          .layers = std::move(layers)};
}

ArenaOrder arena_of(const std::string& name) {
  for (const ArenaOrder order : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor})
    if (name == arena_order_name(order)) return order;
  raise(invalid_argument("arena is \"" + name + "\", allowed are block_major, layer_major"));
}

CachePtr make_cache(nb::handle groups, nb::handle num_layers, nb::handle num_kv_heads, nb::handle head_dim,
                    nb::handle head_dim_v, int64_t num_q_heads, int64_t sliding_window, nb::handle kv_quant,
                    int64_t block_size, int64_t num_blocks, nb::handle dynamic, int64_t kv_memory,
                    int64_t max_context, int64_t longest_chunk, int64_t max_sequences, const std::string& arena,
                    bool prefix_sharing, std::string fingerprint, const std::string& query_path, std::string isa) {
  CacheOptions options{.block_size = Tokens(block_size),
                       .num_blocks = Blocks(num_blocks),
                       .dynamic = dynamic.is_none() ? check(paged_kv_options_from_env({.dynamic = false})).dynamic
                                                    : nb::cast<bool>(dynamic),
                       .kv_memory = Bytes(kv_memory),
                       .max_context = Tokens(max_context),
                       .longest_chunk = Tokens(longest_chunk),
                       .max_sequences = max_sequences,
                       .arena = arena_of(arena),
                       .prefix_sharing = prefix_sharing,
                       .fingerprint = std::move(fingerprint),
                       .query_path = check(parse_query_path(query_path)),
                       .isa = std::move(isa)};
  if (!groups.is_none()) {
    if (!num_layers.is_none() || !num_kv_heads.is_none() || !head_dim.is_none())
      raise(invalid_argument("give either groups, or num_layers, num_kv_heads and head_dim"));
    options.groups = nb::cast<std::vector<GroupSpec>>(groups);
  } else {
    if (num_kv_heads.is_none() || head_dim.is_none())
      raise(invalid_argument("num_kv_heads and head_dim are needed where no groups are given"));
    const int64_t n = num_layers.is_none() ? 1 : nb::cast<int64_t>(num_layers);
    if (n < 1 || n > 65536)
      raise(invalid_argument("num_layers is " + std::to_string(n) + ", allowed are 1 to 65536"));
    std::vector<int> layers;
    for (int layer = 0; layer < int(n); ++layer) layers.push_back(layer);
    options.groups = {make_group(std::move(layers), nb::cast<int64_t>(num_kv_heads), nb::cast<int64_t>(head_dim),
                                 head_dim_v, num_q_heads, sliding_window, kv_quant)};
  }
  auto made = std::make_shared<PyCache>();
  Result<std::unique_ptr<Cache>> cache = Status(Code::kInternal, "not made");
  {
    const nb::gil_scoped_release release;
    cache = Cache::create(std::move(options));
  }
  made->cache = check(std::move(cache));
  const auto& specs = made->cache->options().groups;
  for (size_t g = 0; g < specs.size(); ++g)
    for (const int layer : specs[g].layers) {
      if (made->group_of_layer.size() <= size_t(layer)) made->group_of_layer.resize(size_t(layer) + 1, -1);
      made->group_of_layer[size_t(layer)] = int(g);
    }
  warn_of_notices();
  return made;
}

// --- plans ---------------------------------------------------------------------------------------------------

struct PairIn {
  PySequence sequence;
  nb::object value;
};
std::vector<PairIn> pairs_of(nb::handle requests, const char* what) {
  std::vector<PairIn> out;
  if (!nb::isinstance<nb::sequence>(requests))
    raise_type_error(std::string("requests are a list of (sequence, ") + what + ") pairs");
  for (const nb::handle item : nb::borrow(requests)) {
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 2 || !nb::isinstance<PySequence>(item[0]))
      raise_type_error(std::string("a request is a pair (sequence, ") + what + ")");
    out.push_back({nb::cast<PySequence>(item[0]), nb::object(item[1])});
  }
  return out;
}

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
  PyPlan plan(self, check(locked(*self, [&] { return self->cache->reserve(asked); })), false);
  for (const StepRequest& request : asked) plan.ids.emplace_back(request.sequence.index, 0);
  return plan;
}

PyPlan plan_read(const CachePtr& self, nb::handle requests, int64_t num_q_heads) {
  std::vector<ReadRequest> asked;
  for (const PairIn& pair : pairs_of(requests, "n_queries")) {
    int64_t n_queries = 0;
    if (!nb::try_cast(pair.value, n_queries)) raise_type_error("n_queries is an integer");
    asked.push_back({id_of(*self, pair.sequence), Tokens(n_queries)});
  }
  std::vector<std::pair<uint32_t, uint64_t>> seen;
  PyPlan plan(self,
              check(locked(*self,
                           [&] {
                             for (const ReadRequest& request : asked)
                               seen.emplace_back(request.sequence.index, self->change_of(request.sequence.index));
                             return self->cache->plan_read(asked, num_q_heads);
                           })),
              true);
  plan.seen = std::move(seen);
  plan.num_q_heads = num_q_heads;
  return plan;
}

void commit(PyPlan& plan, nb::handle accepted, bool all_or_none) {
  if (plan.reads_only) raise(invalid_argument("the plan only reads: there is nothing to commit"));
  std::vector<Tokens> counts;
  if (!accepted.is_none()) {
    const IntsIn<int64_t> given(accepted, "accepted", {kAny});
    for (int64_t i = 0; i < given.size(); ++i) counts.emplace_back(given.data()[i]);
    if (counts.empty() && plan.get().n_sequences() > 0) raise(invalid_argument("accepted is empty"));
  }
  Result<std::vector<Status>> statuses = locked(*plan.cache, [&]() -> Result<std::vector<Status>> {
    if (Status status = plan.usable(); !status.ok()) return status;
    if (all_or_none) {
      auto faults = plan.cache->cache->faults(*plan.plan);
      if (!faults.ok()) return faults;
      for (const Status& status : *faults)
        if (!status.ok()) {
          plan.cache->cache->abandon(*plan.plan);
          plan.end();
          return status;
        }
    }
    auto ended = plan.cache->cache->commit(*plan.plan, counts);
    if (ended.ok()) plan.end();
    return ended;
  });
  for (const Status& status : check(std::move(statuses))) check(status);
}

void abandon(PyPlan& plan) {
  if (plan.reads_only) return;
  locked(*plan.cache, [&] {
    if (!plan.plan) return;
    plan.cache->cache->abandon(*plan.plan);
    plan.end();
  });
}

// A copy: the plan's own arrays are filled again by the next step.
template <class Int>
nb::object ints(std::span<const Int> values, const std::vector<int64_t>& shape) {
  std::vector<std::byte> bytes(values.size_bytes());
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return byte_array(Framework::kNumpy, std::move(bytes), shape,
                    {uint8_t(nb::dlpack::dtype_code::Int), uint8_t(8 * sizeof(Int)), 1});
}

// --- append and attend ---------------------------------------------------------------------------------------

void append(PyPlan& plan, int layer, nb::handle k, nb::handle v) {
  PyCache& cache = *plan.cache;
  const LayerShape& shape = cache.group(layer).shape;
  const int64_t n = plan.get().n_tokens();
  const RowsIn keys(k, "k", n, shape.num_kv_heads, shape.head_dim_k, cache.arrays);
  const RowsIn values(v, "v", n, shape.num_kv_heads, shape.head_dim_v, cache.arrays);
  const int64_t work = n * shape.num_kv_heads * (shape.head_dim_k + shape.head_dim_v) * 8;
  check(locked(cache, [&]() -> Status {
    if (Status status = plan.usable(); !status.ok() || n == 0) return status;
    const int parts = parts_for(work);
    std::atomic<bool> failed = false;
    Status first;
    run_parts(parts, [&](int part) {
      if (Status status = cache.cache->append(*plan.plan, layer, keys.rows(), values.rows(), {part, parts});
          !status.ok() && !failed.exchange(true))
        first = status;
    });
    return first;
  }));
}

nb::object attend(PyPlan& plan, int layer, nb::handle q, nb::handle out, nb::handle scale, double softcap,
                  nb::handle sliding_window, nb::handle sinks, bool return_lse) {
  PyCache& cache = *plan.cache;
  const GroupSpec& group = cache.group(layer);
  StepPlan& step = plan.get();
  const int64_t n = step.n_tokens();
  const int64_t heads = plan.num_q_heads != 0 ? plan.num_q_heads : group.num_q_heads;
  const QueriesIn queries(q, n, heads, group.shape.head_dim_k, cache.arrays);
  FloatsOut result(queries.shape(), group.shape.head_dim_v, queries.array(), out, "out", cache.arrays);
  std::optional<FloatsIn> sink_logits;
  if (!sinks.is_none()) sink_logits.emplace(sinks, "sinks", Extents{heads}, cache.arrays);
  auto lse = std::unique_ptr<float[]>(return_lse ? new float[size_t(n * heads + 1)] : nullptr);
  AttendArgs args{.plan = step,
                  .layer = layer,
                  .q = queries.data(),
                  .q_token_stride = queries.token_stride(),
                  .out = result.data(),
                  .lse = lse.get(),
                  .scale = scale_of(scale),
                  .softcap = float(softcap),
                  .sliding_window = window_of(sliding_window),
                  .sinks = sink_logits ? sink_logits->data() : nullptr};
  check(locked(cache, [&]() -> Status {
    if (Status status = plan.usable(); !status.ok() || n == 0) return status;
    int64_t products = 0;
    const auto lengths = step.seq_lens(), starts = step.query_start_loc();
    for (size_t s = 0; s < lengths.size(); ++s) products += int64_t(starts[s + 1] - starts[s]) * lengths[s];
    const int parts = parts_for(products * heads * (group.shape.head_dim_k + group.shape.head_dim_v));
    args.scratch = cache.scratch.get(cache.cache->scratch_bytes(step, parts).n);
    std::atomic<bool> failed = false;
    Status first;
    run_parts(parts, [&](int part) {
      if (Status status = cache.cache->attend(args, {part, parts}); !status.ok() && !failed.exchange(true))
        first = status;
    });
    if (!first.ok()) return first;
    return cache.cache->merge(args);
  }));
  nb::object made = result.finish();
  if (!return_lse) return made;
  return nb::make_tuple(made, float_array(queries.array().framework(), std::move(lse), {n, heads}));
}

nb::tuple read_dense(PyCache& cache, PyPlan& plan, int64_t place, int layer, int64_t first, nb::handle out_k,
                     nb::handle out_v) {
  const LayerShape& shape = cache.group(layer).shape;
  if (plan.cache.get() != &cache) raise(invalid_argument("the plan is of another cache"));
  const auto lengths = plan.get().seq_lens();
  if (place < 0 || place >= int64_t(lengths.size()))
    raise(invalid_argument("place is " + std::to_string(place) + ", the plan has " +
                           std::to_string(lengths.size()) + " sequences"));
  const int64_t n = lengths[size_t(place)] - first;
  if (first < 0 || n < 0)
    raise(invalid_argument("first is " + std::to_string(first) + ", the sequence has " +
                           std::to_string(lengths[size_t(place)]) + " tokens"));
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

struct PyLayerTensors {
  nb::object k, v, k_scales, v_scales;
};

PyLayerTensors tensors(const CachePtr& self, int layer) {
  const LayerShape& shape = self->group(layer).shape;
  const int group = self->group_of_layer[size_t(layer)];
  int64_t n_blocks = 0;
  LayerTensors views = check(locked(*self, [&]() -> Result<LayerTensors> {
    const auto kept = self->cache->keep_committed(group);
    if (!kept.ok()) return kept.status();
    n_blocks = kept->n;
    return self->cache->tensors(layer);
  }));
  const nb::object owner = nb::cast(self);
  const auto view = [&](TensorView tensor, Format format, bool scales) -> nb::object {
    if (tensor.data == nullptr) return nb::none();
    tensor.shape[0] = n_blocks;
    return block_tensor(tensor, format, scales, owner);
  };
  return {view(views.k, shape.formats.k, false), view(views.v, shape.formats.v, false),
          view(views.k_scales, shape.formats.k, true), view(views.v_scales, shape.formats.v, true)};
}

nb::dict stats(PyCache& cache, bool resident) {
  const Stats s = locked(cache, [&] { return cache.cache->stats(resident); });
  nb::dict out = nb::cast<nb::dict>(nb::module_::import_("json").attr("loads")(to_json(s)));
  out["arrays"] = to_dict(cache.arrays);
  return out;
}

}  // namespace

int parts_for(int64_t products) {
  constexpr int64_t kWorthAThread = 1 << 20;  // about 30 us, twice what waking one costs
  const int64_t most = std::max<int64_t>(1, products / kWorthAThread);
  return int(std::min<int64_t>(most, num_threads()));
}

float scale_of(nb::handle scale) {
  if (scale.is_none()) return 0;
  const double value = nb::cast<double>(scale);
  if (!(value > 0) || !std::isfinite(float(value)) || float(value) == 0)
    raise(
        invalid_argument("scale is " + nb::cast<std::string>(nb::str(scale)) + ", it must be finite and above 0"));
  return float(value);
}

int64_t window_of(nb::handle sliding_window) {
  if (sliding_window.is_none()) return 0;
  const int64_t value = nb::cast<int64_t>(sliding_window);
  if (value == -1) return 0;
  if (value < 1)
    raise(invalid_argument("sliding_window is " + std::to_string(value) +
                           ", allowed are 1 and more, -1 or None for none"));
  return value;
}

void bind_cache(nb::module_& m) {
  nb::class_<GroupSpec>(m, "Group", "Layers that share block shape, format and window.")
      .def(
          "__init__",
          [](GroupSpec* self, std::vector<int> layers, int64_t num_kv_heads, int64_t head_dim,
             nb::handle head_dim_v, int64_t num_q_heads, int64_t sliding_window, nb::handle kv_quant) {
            new (self) GroupSpec(make_group(std::move(layers), num_kv_heads, head_dim, head_dim_v, num_q_heads,
                                            sliding_window, kv_quant));
          },
          nb::kw_only(), nb::arg("layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("head_dim_v") = nb::none(), nb::arg("num_q_heads") = 0, nb::arg("sliding_window") = 0,
          nb::arg("kv_quant") = nb::none())
      .def_prop_ro("layers", [](const GroupSpec& g) { return g.layers; })
      .def_prop_ro("num_kv_heads", [](const GroupSpec& g) { return g.shape.num_kv_heads; })
      .def_prop_ro("num_q_heads", [](const GroupSpec& g) { return g.num_q_heads; })
      .def_prop_ro("head_dim", [](const GroupSpec& g) { return g.shape.head_dim_k; })
      .def_prop_ro("head_dim_v", [](const GroupSpec& g) { return g.shape.head_dim_v; })
      .def_prop_ro("sliding_window", [](const GroupSpec& g) { return g.sliding_window; })
      .def_prop_ro("kv_quant", [](const GroupSpec& g) { return kv_quant_name(g.shape.formats); })
      .def_prop_ro(
          "bytes_per_token",
          [](const GroupSpec& g) { return bytes_per_token(g.shape).n * int64_t(g.layers.size()); },
          "Bytes that one token takes in all layers of the group, without padding.");

  nb::class_<PySequence>(m, "Sequence", "A handle to one sequence of a cache.")
      .def(
          "__eq__", [](const PySequence& a, const PySequence& b) { return a == b; }, nb::is_operator())
      .def("__hash__",
           [](const PySequence& s) { return std::hash<uint64_t>()(uint64_t(s.id.index) << 32 | s.id.generation); })
      .def("__repr__", [](const PySequence& s) {
        return "Sequence(" + std::to_string(s.id.index) + ", generation " + std::to_string(s.id.generation) + ")";
      });

  struct PyStarted {
    PySequence sequence;
    int64_t reused;
    std::string reason;
  };
  nb::class_<PyStarted>(m, "Started", "What Cache.start found.")
      .def_ro("sequence", &PyStarted::sequence)
      .def_ro("reused", &PyStarted::reused, "Leading prompt tokens that are in the cache.")
      .def_ro("reason", &PyStarted::reason, "Why not more: hit, new, evicted, window_gone, last_token, ...")
      .def("__iter__", [](const PyStarted& s) { return nb::iter(nb::make_tuple(s.sequence, s.reused, s.reason)); });

  nb::class_<PyLayerTensors>(
      m, "LayerTensors",
      "Views of one layer's blocks, [num_blocks, block_size, num_kv_heads, width], without a "
      "copy. Take them with numpy.from_dlpack or torch.from_dlpack.")
      .def_ro("k", &PyLayerTensors::k)
      .def_ro("v", &PyLayerTensors::v)
      .def_ro("k_scales", &PyLayerTensors::k_scales, "float32 [num_blocks, block_size, num_kv_heads, 1], or None.")
      .def_ro("v_scales", &PyLayerTensors::v_scales);

  nb::class_<PyPlan>(
      m, "StepPlan",
      "The read-only description of one step. As a context manager it commits at the end, and abandons "
      "when an exception leaves the block.")
      .def("commit", &commit, nb::arg("accepted") = nb::none(), nb::kw_only(), nb::arg("all_or_none") = false,
           "Ends the step: each sequence grows by its accepted tokens (default: all).\n\n"
           "Errors: NotFiniteError, StaleError for the first sequence that was rejected; the others are committed, "
           "unless\n"
           "all_or_none: then NaN or infinity in one abandons the step for all.")
      .def("abandon", &abandon, "Ends the step without accepting anything.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__",
          [](PyPlan& plan, nb::handle type, nb::handle, nb::handle) {
            if (!plan.plan || plan.reads_only) return;
            if (type.is_none())
              commit(plan, nb::none(), false);
            else
              abandon(plan);
          },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none())
      .def_prop_ro("n_sequences", [](PyPlan& p) { return p.get().n_sequences(); })
      .def_prop_ro("n_tokens", [](PyPlan& p) { return p.get().n_tokens(); })
      .def_prop_ro(
          "open", [](PyPlan& p) { return p.plan.has_value(); }, "False once committed or abandoned.")
      .def_prop_ro(
          "seq_lens", [](PyPlan& p) { return ints(p.get().seq_lens(), {p.get().n_sequences()}); },
          "int32 [n_sequences], lengths after the new tokens.")
      .def_prop_ro("query_start_loc",
                   [](PyPlan& p) { return ints(p.get().query_start_loc(), {p.get().n_sequences() + 1}); })
      .def_prop_ro("positions", [](PyPlan& p) { return ints(p.get().positions(), {p.get().n_tokens()}); })
      .def(
          "block_tables",
          [](PyPlan& p, int group) {
            if (group < 0 || size_t(group) >= p.cache->cache->options().groups.size())
              raise(invalid_argument("group " + std::to_string(group) + " is not one of this cache's"));
            const GroupPlan plan = p.get().group(group);
            return ints(plan.block_tables, {p.get().n_sequences(), plan.max_blocks});
          },
          nb::arg("group") = 0, "int32 [n_sequences, max_blocks], -1 where nothing is held.")
      .def(
          "slot_mapping",
          [](PyPlan& p, int group) {
            if (group < 0 || size_t(group) >= p.cache->cache->options().groups.size())
              raise(invalid_argument("group " + std::to_string(group) + " is not one of this cache's"));
            const auto slots = p.get().group(group).slot_mapping;
            return ints(slots, {int64_t(slots.size())});
          },
          nb::arg("group") = 0, "int64 [n_tokens], the slot of each new token.");

  nb::class_<PyCache>(m, "Cache",
                      "The paged KV cache of a model: blocks, sequences, steps. Any thread may call it; calls take "
                      "turns.")
      .def(nb::new_(&make_cache), nb::arg("groups") = nb::none(), nb::kw_only(), nb::arg("num_layers") = nb::none(),
           nb::arg("num_kv_heads") = nb::none(), nb::arg("head_dim") = nb::none(),
           nb::arg("head_dim_v") = nb::none(), nb::arg("num_q_heads") = 0, nb::arg("sliding_window") = 0,
           nb::arg("kv_quant") = nb::none(), nb::arg("block_size") = 16, nb::arg("num_blocks") = 1024,
           nb::arg("dynamic") = nb::none(), nb::arg("kv_memory") = 0, nb::arg("max_context") = 0,
           nb::arg("longest_chunk") = 512, nb::arg("max_sequences") = 1, nb::arg("arena") = "block_major",
           nb::arg("prefix_sharing") = true, nb::arg("fingerprint") = "", nb::arg("query_path") = "auto",
           nb::arg("isa") = "")
      .def(
          "start",
          [](const CachePtr& self, nb::handle prompt, const std::string& name_space, bool reuse, bool store) {
            const IntsIn<int32_t> tokens(prompt, "prompt", {kAny});
            const Started started = check(locked(*self, [&] {
              return self->cache->start({tokens.data(), size_t(tokens.size())},
                                        {.name_space = name_space, .reuse = reuse, .store = store});
            }));
            return PyStarted{{self.get(), started.id}, started.reused.n, prefix_reason_name(started.reason)};
          },
          nb::arg("prompt") = nb::make_tuple(), nb::kw_only(), nb::arg("name_space") = "", nb::arg("reuse") = true,
          nb::arg("store") = true,
          "Opens a sequence and takes over the cached blocks of the longest known prefix of `prompt` (token ids).")
      .def(
          "fork",
          [](const CachePtr& self, const PySequence& sequence) {
            const SequenceId id = id_of(*self, sequence);
            return PySequence{self.get(), check(locked(*self, [&] { return self->cache->fork(id); }))};
          },
          nb::arg("sequence"),
          "A second sequence with the same content; blocks are shared until one of them writes.")
      .def(
          "truncate",
          [](PyCache& self, const PySequence& sequence, int64_t new_length) {
            const SequenceId id = id_of(self, sequence);
            check(locked(self, [&] {
              Status status = self.cache->truncate(id, Tokens(new_length));
              if (status.ok()) self.changed(id.index);
              return status;
            }));
          },
          nb::arg("sequence"), nb::arg("new_length"),
          "Shortens to new_length tokens. ValueError past the end or behind what a window still holds.")
      .def(
          "release",
          [](PyCache& self, const PySequence& sequence) {
            const SequenceId id = id_of(self, sequence);
            check(locked(self, [&] {
              Status status = self.cache->release(id);
              if (status.ok()) self.changed(id.index);
              return status;
            }));
          },
          nb::arg("sequence"), "Ends the sequence. Finished blocks stay cached for later prompts.")
      .def(
          "length",
          [](PyCache& self, const PySequence& sequence) {
            const SequenceId id = id_of(self, sequence);
            return check(locked(self, [&] { return self.cache->length(id); })).n;
          },
          nb::arg("sequence"), "Tokens of a sequence.")
      .def(
          "blocks_held",
          [](PyCache& self, const PySequence& sequence, int group) {
            const SequenceId id = id_of(self, sequence);
            return check(locked(self, [&] { return self.cache->blocks_held(id, group); })).n;
          },
          nb::arg("sequence"), nb::arg("group") = 0)
      .def(
          "clear_cached", [](PyCache& self) { locked(self, [&] { self.cache->clear_cached(); }); },
          "Drops every block that no sequence holds.")
      .def(
          "grow_to_capacity",
          [](PyCache& self, int64_t tokens) {
            check(locked(self, [&] { return self.cache->grow_to_capacity(Tokens(tokens)); }));
          },
          nb::arg("tokens"), "Commits memory for so many tokens in all, and keeps it. CapacityError.")
      .def("reserve", &reserve, nb::arg("requests"),
           "Takes the blocks of a step, or changes nothing.\n\n"
           "  requests  list of (sequence, n_tokens) or (sequence, token ids); ids make full blocks findable\n\n"
           "Errors: CapacityError (`need 214 tokens (14 blocks), have ...`), StaleError, ValueError.")
      .def("plan_read", &plan_read, nb::arg("requests"), nb::arg("num_q_heads") = 0,
           "A plan that only reads: queries at each sequence's last positions.\n\n"
           "  requests  list of (sequence, n_queries)")
      .def("tensors", &tensors, nb::arg("layer"),
           "Views of a layer's blocks, without a copy. They stay valid while the pool grows, and keep it alive; "
           "what is "
           "committed now is not given back any more.")
      .def("read_dense", &read_dense, nb::arg("plan"), nb::arg("place"), nb::arg("layer"), nb::arg("first") = 0,
           nb::arg("out_k") = nb::none(), nb::arg("out_v") = nb::none(),
           "Decodes the rows of one sequence of a plan from position `first` on: k, v float32 [num_kv_heads, n, "
           "head_dim]. For interoperability; counted in dense_materializations.")
      .def("stats", &stats, nb::arg("resident") = false, "Every counter, as a dict.")
      .def(
          "verify", [](PyCache& self) { check(locked(self, [&] { return self.cache->verify(); })); },
          "Walks every invariant; RuntimeError names the first broken one.")
      .def_prop_ro(
          "capacity", [](PyCache& self) { return locked(self, [&] { return self.cache->capacity().n; }); },
          "Most tokens the pool can ever hold.")
      .def_prop_ro(
          "committed_capacity",
          [](PyCache& self) { return locked(self, [&] { return self.cache->committed_capacity().n; }); },
          "Tokens that fit in what is committed now.")
      .def_prop_ro(
          "available", [](PyCache& self) { return locked(self, [&] { return self.cache->available().n; }); },
          "Tokens that could be reserved now.")
      .def_prop_ro("block_size", [](PyCache& self) { return self.cache->options().block_size.n; })
      .def_prop_ro("groups", [](PyCache& self) { return self.cache->options().groups; })
      .def_prop_ro("dynamic", [](PyCache& self) { return self.cache->options().dynamic; })
      .def_prop_ro(
          "isa", [](PyCache& self) { return std::string(self.cache->isa()); }, "The kernels that run.")
      .def(
          "query_path",
          [](PyCache& self, int group) {
            if (group < 0 || size_t(group) >= self.cache->options().groups.size())
              raise(invalid_argument("group " + std::to_string(group) + " is not one of this cache's"));
            return std::string(query_path_name(self.cache->query_path(group)));
          },
          nb::arg("group") = 0)
      .def(
          "image_bytes",
          [](PyCache& self, int group) {
            if (group < 0 || size_t(group) >= self.cache->options().groups.size())
              raise(invalid_argument("group " + std::to_string(group) + " is not one of this cache's"));
            return self.cache->image_bytes(group).n;
          },
          nb::arg("group") = 0, "Bytes of one block, padding included.");

  m.def("append", &append, nb::arg("plan"), nb::arg("layer"), nb::arg("k").none(), nb::arg("v").none(),
        "Writes a step's new rows of one layer into their slots, quantizing if the group does.\n\n"
        "  k, v  [plan.n_tokens, num_kv_heads, head_dim], or with a batch [batch, num_kv_heads, n, head_dim] of\n"
        "        batch * n = plan.n_tokens; float32, float16 or bfloat16; K already rotated\n\n"
        "NaN and infinity are reported by commit. Errors: ValueError (shapes), TypeError (dtype), StaleError.\n"
        "Source: PagedAttention, arXiv 2309.06180, section 4.1.");
  m.def(
      "attend", &attend, nb::arg("plan"), nb::arg("layer"), nb::arg("q"), nb::kw_only(),
      nb::arg("out") = nb::none(), nb::arg("scale") = nb::none(), nb::arg("softcap") = 0.0,
      nb::arg("sliding_window") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("return_lse") = false,
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
  m.def("num_threads", &num_threads, "Threads that attention may take; at first the CPUs of this process.");
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 1 || n > 1024)
          raise(invalid_argument("num_threads is " + std::to_string(n) + ", allowed are 1 to 1024"));
        set_num_threads(n);
      },
      nb::arg("n"));
  m.def(
      "array_stats", [] { return to_dict(process_counters()); },
      "How arrays of the functions that belong to no cache crossed the border.");
}

}  // namespace pagedkv::python
