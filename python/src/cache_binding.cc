// Cache, its sequences and groups.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "cache.h"
#include "options.h"
#include "pagedkv/paged_kv_cache.h"

namespace pagedkv::python {
namespace {

struct GroupArgs {
  std::optional<std::vector<int>> layers;
  std::optional<int64_t> num_kv_heads, head_dim, head_dim_v;
  int64_t sliding_window = 0;
  std::optional<KvQuantConfig> kv_quant;
};
constexpr Field<GroupArgs> kGroupFields[] = {
    {"layers", &field<&GroupArgs::layers>},
    {"num_kv_heads", &field<&GroupArgs::num_kv_heads>},
    {"head_dim", &field<&GroupArgs::head_dim>},
    {"head_dim_v", &field<&GroupArgs::head_dim_v>},
    {"sliding_window", &field<&GroupArgs::sliding_window>},
    {"kv_quant", &field<&GroupArgs::kv_quant>},
};

// Requires: layers, num_kv_heads and head_dim.
GroupSpec make_group(const GroupArgs& args) {
  return {.shape = {*args.num_kv_heads, *args.head_dim, args.head_dim_v.value_or(*args.head_dim),
                    args.kv_quant ? *args.kv_quant : check(kv_quant_from_env())},
          .sliding_window = args.sliding_window,
          .layers = *args.layers};
}

struct CacheArgs {
  CacheOptions cache;
  std::optional<bool> dynamic;
  std::optional<int64_t> num_layers;
  int64_t num_q_heads = 0;
  GroupArgs group;  // of all layers, where no groups are given
};
constexpr Field<CacheArgs> kCacheFields[] = {
    {"num_layers", &field<&CacheArgs::num_layers>},
    {"num_kv_heads", &field<&CacheArgs::group, &GroupArgs::num_kv_heads>},
    {"head_dim", &field<&CacheArgs::group, &GroupArgs::head_dim>},
    {"head_dim_v", &field<&CacheArgs::group, &GroupArgs::head_dim_v>},
    {"num_q_heads", &field<&CacheArgs::num_q_heads>},
    {"sliding_window", &field<&CacheArgs::group, &GroupArgs::sliding_window>},
    {"kv_quant", &field<&CacheArgs::group, &GroupArgs::kv_quant>},
    {"block_size", &field<&CacheArgs::cache, &CacheOptions::block_size>},
    {"num_blocks", &field<&CacheArgs::cache, &CacheOptions::num_blocks>},
    {"dynamic", &field<&CacheArgs::dynamic>},
    {"kv_memory", &field<&CacheArgs::cache, &CacheOptions::kv_memory>},
    {"max_context", &field<&CacheArgs::cache, &CacheOptions::max_context>},
    {"longest_chunk", &field<&CacheArgs::cache, &CacheOptions::longest_chunk>},
    {"max_sequences", &field<&CacheArgs::cache, &CacheOptions::max_sequences>},
    {"arena", &field<&CacheArgs::cache, &CacheOptions::arena>},
    {"prefix_sharing", &field<&CacheArgs::cache, &CacheOptions::prefix_sharing>},
    {"fingerprint", &field<&CacheArgs::cache, &CacheOptions::fingerprint>},
    {"query_path", &field<&CacheArgs::cache, &CacheOptions::query_path>},
    {"isa", &field<&CacheArgs::cache, &CacheOptions::isa>},
};

std::vector<GroupSpec> groups_of(nb::handle groups, CacheArgs& args) {
  const GroupArgs& group = args.group;
  if (!groups.is_none()) {
    if (args.num_layers || group.num_kv_heads || group.head_dim)
      raise(invalid_argument("give either groups, or num_layers, num_kv_heads and head_dim"));
    std::vector<GroupSpec> out;
    if (!nb::try_cast(nb::borrow(groups), out)) refuse_type({"groups", groups}, "lists of Group");
    return out;
  }
  if (!group.num_kv_heads || !group.head_dim)
    raise(invalid_argument("num_kv_heads and head_dim are needed where no groups are given"));
  const int64_t n = args.num_layers.value_or(1);
  if (n < 1 || n > 65536)
    raise(invalid_argument("num_layers is " + std::to_string(n) + ", allowed are 1 to 65536"));
  std::vector<int>& layers = args.group.layers.emplace(size_t(n));
  std::iota(layers.begin(), layers.end(), 0);
  return {make_group(group)};
}

// 0: not said.
int64_t q_heads_per_kv_head(const CacheArgs& args) {
  if (args.num_q_heads == 0 || args.cache.groups.empty()) return 0;
  const int64_t heads = std::max<int64_t>(1, args.cache.groups.front().shape.num_kv_heads);
  if (args.num_q_heads < 0 || args.num_q_heads % heads != 0)
    raise(invalid_argument("num_q_heads is " + std::to_string(args.num_q_heads) + ", no multiple of " +
                           std::to_string(heads) + " KV heads"));
  return args.num_q_heads / heads;
}

// Types only: sizes are the cache's to judge, when it is made.
void check_cache_options(const nb::kwargs& given) {
  CacheArgs args;
  read_options("Cache", given, kCacheFields, args);
}

CachePtr make_cache(nb::handle groups, const nb::kwargs& given) {
  CacheArgs args;
  read_options("Cache", given, kCacheFields, args);
  args.cache.groups = groups_of(groups, args);
  args.cache.q_heads_per_kv_head = q_heads_per_kv_head(args);
  args.cache.dynamic = args.dynamic ? *args.dynamic : check(paged_kv_options_from_env({.dynamic = false})).dynamic;
  auto made = std::make_shared<PyCache>();
  made->cache = check(without_gil([&] { return Cache::create(std::move(args.cache)); }));
  const auto& specs = made->cache->options().groups;
  for (size_t g = 0; g < specs.size(); ++g)
    for (const int layer : specs[g].layers) {
      if (made->group_of_layer.size() <= size_t(layer)) made->group_of_layer.resize(size_t(layer) + 1, -1);
      made->group_of_layer[size_t(layer)] = int(g);
    }
  warn_of_notices();
  return made;
}

struct PyLayerTensors {
  nb::any k, v, k_scales, v_scales;
};

PyLayerTensors tensors(const CachePtr& self, Given<int> given) {
  const int layer = given.read_as("layer");
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
  const auto view = [&](TensorView tensor, Format format, bool scales) -> nb::any {
    if (tensor.data == nullptr) return nb::borrow<nb::any>(nb::none());
    tensor.shape[0] = n_blocks;
    return nb::borrow<nb::any>(block_tensor(tensor, format, scales, owner));
  };
  return {view(views.k, shape.formats.k, false), view(views.v, shape.formats.v, false),
          view(views.k_scales, shape.formats.k, true), view(views.v_scales, shape.formats.v, true)};
}

Figures stats(PyCache& cache, Given<bool> given) {
  const bool resident = given.read_as("resident");
  const Stats s = locked(cache, [&] { return cache.cache->stats(resident); });
  nb::dict out = nb::cast<nb::dict>(from_json(to_json(s)));
  if (!resident) nb::del(out["bytes_resident"]);  // not looked at, which 0 would not say
  out["arrays"] = to_dict(cache.arrays);
  return out;
}

}  // namespace

void read(const Argument& argument, PySequence& into) {
  if (!nb::try_cast(nb::borrow(argument.value), into)) refuse_type(argument, "what start and fork return");
}

// A list, as long as what it binds. NOLINTNEXTLINE(readability-function-size)
void bind_cache(nb::module_& m) {
  m.def("check_cache_options", &check_cache_options, nb::arg("options"));
  nb::class_<GroupSpec>(m, "Group", "Layers that share block shape, format and window.")
      .def(
          "__init__",
          [](GroupSpec* self, const nb::kwargs& given) {
            GroupArgs args;
            read_options("Group", given, kGroupFields, args);
            for (const auto& [name, there] : {std::pair("layers", args.layers.has_value()),
                                              {"num_kv_heads", args.num_kv_heads.has_value()},
                                              {"head_dim", args.head_dim.has_value()}}) {
              if (there) continue;
              if (given.contains(name)) refuse_type({name, nb::none()}, "integers; of layers, a list");
              raise_type_error("Group needs layers, num_kv_heads and head_dim");
            }
            new (self) GroupSpec(make_group(args));
          },
          nb::arg("options"),
          nb::sig("def __init__(self, *, layers: collections.abc.Sequence[int], num_kv_heads: int, head_dim: int, "
                  "head_dim_v: int | None = None, sliding_window: int = 0, "
                  "kv_quant: str | pagedkv.quant.PagedKVQuantConfig | None = None) -> None"))
      .def_prop_ro("layers", [](const GroupSpec& g) { return g.layers; })
      .def_prop_ro("num_kv_heads", [](const GroupSpec& g) { return g.shape.num_kv_heads; })
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
      .def("__reduce__",
           [](nb::handle) { raise_type_error("[Sequence] a handle is not pickled: it is of one cache's"); })
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
      .def(
          "__iter__", [](const PyStarted& s) { return nb::iter(nb::make_tuple(s.sequence, s.reused, s.reason)); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[typing.Any]"));

  nb::class_<PyLayerTensors>(
      m, "LayerTensors",
      "Views of one layer's blocks, [num_blocks, block_size, num_kv_heads, width], without a "
      "copy. Take them with numpy.asarray or torch.from_dlpack.")
      .def_ro("k", &PyLayerTensors::k)
      .def_ro("v", &PyLayerTensors::v)
      .def_ro("k_scales", &PyLayerTensors::k_scales, "float32 [num_blocks, block_size, num_kv_heads, 1], or None.")
      .def_ro("v_scales", &PyLayerTensors::v_scales);

  nb::class_<PyCache>(m, "Cache",
                      "The paged KV cache of a model: blocks, sequences, steps. Any thread may call it; calls take "
                      "turns.")
      // As nb::new_ binds it, but for the signature, which must not name both.
      .def_static(
          "__new__",
          [](nb::handle, nb::handle groups, const nb::kwargs& given) { return make_cache(groups, given); },
          nb::arg("cls"), nb::arg("groups") = nb::none(), nb::arg("options"),
          nb::call_policy<nb::detail::new_returntype_fixup_policy>())
      .def(
          "__init__", [](nb::handle, nb::handle, const nb::kwargs&) {}, nb::arg("groups") = nb::none(),
          nb::arg("options"),
          nb::sig("def __init__(self, groups: collections.abc.Sequence[Group] | None = None, *, num_layers: int | "
                  "None = None, "
                  "num_kv_heads: int | None = None, head_dim: int | None = None, head_dim_v: int | None = None, "
                  "num_q_heads: int = 0, sliding_window: int = 0, kv_quant: str | pagedkv.quant.PagedKVQuantConfig "
                  "| None = None, "
                  "block_size: int = 16, num_blocks: int = 1024, dynamic: bool | None = None, kv_memory: int = 0, "
                  "max_context: int = 0, longest_chunk: int = 512, max_sequences: int = 1, "
                  "arena: str = 'block_major', prefix_sharing: bool = True, fingerprint: str = '', "
                  "query_path: str = 'auto', isa: str = '') -> None"))
      .def(
          "start",
          [](const CachePtr& self, nb::handle prompt, Given<std::string> name_space, Given<bool> reuse,
             Given<bool> store) {
            const IntsIn<int32_t> tokens(prompt, "prompt", {kAny});
            const std::string name = name_space.read_as("name_space");
            const StartOptions options{
                .name_space = name, .reuse = reuse.read_as("reuse"), .store = store.read_as("store")};
            const Started started = check(locked(*self, [&] {
              return self->cache->start({tokens.data(), size_t(tokens.size())}, options);
            }));
            return PyStarted{{self->number, started.id}, started.reused.n, prefix_reason_name(started.reason)};
          },
          nb::arg("prompt").none() = nb::make_tuple(), nb::kw_only(), nb::arg("name_space").none() = "",
          nb::arg("reuse").none() = true, nb::arg("store").none() = true,
          nb::sig("def start(self, prompt: object = (), *, name_space: str = '', reuse: bool = True, "
                  "store: bool = True) -> Started"),
          "Opens a sequence and takes over the cached blocks of the longest known prefix of `prompt` (token ids).")
      .def(
          "fork",
          [](const CachePtr& self, Given<PySequence> sequence) {
            const SequenceId id = id_of(*self, sequence);
            return PySequence{self->number, check(locked(*self, [&] { return self->cache->fork(id); }))};
          },
          nb::arg("sequence").none(), nb::sig("def fork(self, sequence: Sequence) -> Sequence"),
          "A second sequence with the same content; blocks are shared until one of them writes.")
      .def(
          "truncate",
          [](PyCache& self, Given<PySequence> sequence, Given<int64_t> given) {
            const Tokens new_length(given.read_as("new_length"));
            const SequenceId id = id_of(self, sequence);
            check(locked(self, [&] { return self.cache->truncate(id, new_length); }));
          },
          nb::arg("sequence").none(), nb::arg("new_length").none(),
          nb::sig("def truncate(self, sequence: Sequence, new_length: int) -> None"),
          "Shortens to new_length tokens. ValueError past the end or behind what a window still holds.")
      .def(
          "release",
          [](PyCache& self, Given<PySequence> sequence) {
            const SequenceId id = id_of(self, sequence);
            check(locked(self, [&] { return self.cache->release(id); }));
          },
          nb::arg("sequence").none(), nb::sig("def release(self, sequence: Sequence) -> None"),
          "Ends the sequence. Finished blocks stay cached for later prompts.")
      .def(
          "length",
          [](PyCache& self, Given<PySequence> sequence) {
            const SequenceId id = id_of(self, sequence);
            return check(locked(self, [&] { return self.cache->length(id); })).n;
          },
          nb::arg("sequence").none(), nb::sig("def length(self, sequence: Sequence) -> int"),
          "Tokens of a sequence.")
      .def(
          "blocks_held",
          [](PyCache& self, Given<PySequence> sequence, Given<int> given) {
            const int group = given.read_as("group");
            const SequenceId id = id_of(self, sequence);
            return check(locked(self, [&] { return self.cache->blocks_held(id, group); })).n;
          },
          nb::arg("sequence").none(), nb::arg("group").none() = 0,
          nb::sig("def blocks_held(self, sequence: Sequence, group: int = 0) -> int"))
      .def(
          "clear_cached", [](PyCache& self) { locked(self, [&] { self.cache->clear_cached(); }); },
          "Drops every block that no sequence holds.")
      .def(
          "grow_to_capacity",
          [](PyCache& self, Given<int64_t> given) {
            const Tokens tokens(given.read_as("tokens"));
            check(locked(self, [&] { return self.cache->grow_to_capacity(tokens); }));
          },
          nb::arg("tokens").none(), nb::sig("def grow_to_capacity(self, tokens: int) -> None"),
          "Commits memory for so many tokens in all, and keeps it. CapacityError.")
      .def("reserve", &reserve, nb::arg("requests").none(),
           nb::sig("def reserve(self, requests: object) -> StepPlan"),
           "Takes the blocks of a step, or changes nothing.\n\n"
           "  requests  list of (sequence, n_tokens) or (sequence, token ids); ids make full blocks findable\n\n"
           "Errors: CapacityError (`need 214 tokens (14 blocks), have ...`), StaleError, ValueError.")
      .def("plan_read", &plan_read, nb::arg("requests").none(),
           nb::sig("def plan_read(self, requests: object) -> StepPlan"),
           "A plan that only reads: queries at each sequence's last positions.\n\n"
           "  requests  list of (sequence, n_queries)")
      .def("tensors", &tensors, nb::arg("layer").none(), nb::sig("def tensors(self, layer: int) -> LayerTensors"),
           "Views of a layer's blocks, without a copy. They stay valid while the pool grows, and keep it alive; "
           "what is "
           "committed now is not given back any more.")
      .def("read_dense", &read_dense, nb::arg("plan").none(), nb::arg("place").none(), nb::arg("layer").none(),
           nb::arg("first").none() = 0, nb::arg("out_k") = nb::none(), nb::arg("out_v") = nb::none(),
           nb::sig("def read_dense(self, plan: StepPlan, place: int, layer: int, first: int = 0, "
                   "out_k: object | None = None, out_v: object | None = None) -> tuple[typing.Any, typing.Any]"),
           "Decodes the rows of one sequence of a plan from position `first` on: k, v float32 [num_kv_heads, n, "
           "head_dim]. For interoperability; counted in dense_materializations.")
      .def("stats", &stats, nb::arg("resident").none() = false,
           nb::sig("def stats(self, resident: bool = False) -> dict[str, typing.Any]"),
           "Every counter, as a dict. resident: bytes_resident as well, for which the kernel is asked for every "
           "page.")
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
          [](PyCache& self, Given<int> given) {
            const int group = given.read_as("group");
            self.check_group(group);
            return std::string(query_path_name(self.cache->query_path(group)));
          },
          nb::arg("group").none() = 0, nb::sig("def query_path(self, group: int = 0) -> str"))
      .def(
          "image_bytes",
          [](PyCache& self, Given<int> given) {
            const int group = given.read_as("group");
            self.check_group(group);
            return self.cache->image_bytes(group).n;
          },
          nb::arg("group").none() = 0, nb::sig("def image_bytes(self, group: int = 0) -> int"),
          "Bytes of one block, padding included.")
      .def("__reduce__", [](nb::handle) {
        raise_type_error(
            "[Cache] blocks are not pickled: a process has its own; pagedkv.hf and pagedkv.mlx save files");
      });
}

}  // namespace pagedkv::python
