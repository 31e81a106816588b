// A cache, its sequences and its plans as Python holds them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "errors.h"
#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

namespace pagedkv::python {

// A cache and what Python needs beside it. Everything below `mutex` is touched with it held, and it is only ever
// taken without the GIL: threads take turns, and none waits for the other with a lock in hand.
struct PyCache {
  const uint64_t number = next_number();  // no other cache of this process ever has it
  ForkSafeMutex mutex;
  std::unique_ptr<Cache> cache;
  Scratch scratch;
  // Set at creation.
  std::vector<int> group_of_layer;  // -1: no such layer
  // With the GIL.
  ArrayCounters arrays;

  const GroupSpec& group(int layer) const {
    if (layer < 0 || size_t(layer) >= group_of_layer.size() || group_of_layer[size_t(layer)] < 0)
      raise(invalid_argument("layer " + std::to_string(layer) + " is in no group of this cache"));
    return cache->options().groups[size_t(group_of_layer[size_t(layer)])];
  }
  static uint64_t next_number() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
  void check_group(int group) const {
    if (group < 0 || size_t(group) >= cache->options().groups.size())
      raise(invalid_argument("group " + std::to_string(group) + " is not one of this cache's"));
  }
};
using CachePtr = std::shared_ptr<PyCache>;

template <class F>
auto locked(PyCache& cache, const F& f) {
  const NoGil released;
  const std::scoped_lock lock(cache.mutex);
  return f();
}

struct PySequence {
  uint64_t cache = 0;  // PyCache::number
  SequenceId id;
  bool operator==(const PySequence&) const = default;
};

inline SequenceId id_of(const PyCache& cache, const PySequence& sequence) {
  if (sequence.cache != cache.number) raise(invalid_argument("the sequence is of another cache"));
  return sequence.id;
}

void read(const Argument& argument, PySequence& into);
inline SequenceId id_of(const PyCache& cache, const Given<PySequence>& given) {
  return id_of(cache, given.read_as("sequence"));
}

// A plan of Cache::reserve or plan_read. The sizes are fixed; what is behind `plan` is touched with the cache's
// lock held.
struct PyPlan {
  CachePtr cache;
  std::optional<StepPlan> plan;  // none: the step has ended
  bool reads_only = false;
  int64_t n_sequences, n_tokens;
  std::vector<bool> written;  // by layer: append has come, or somebody asked for the slots to write himself

  PyPlan(CachePtr owner, StepPlan made, bool reads)
      : cache(std::move(owner)),
        plan(std::move(made)),
        reads_only(reads),
        n_sequences(plan->n_sequences()),
        n_tokens(plan->n_tokens()),
        written(cache->group_of_layer.size(), n_tokens == 0) {}
  PyPlan(PyPlan&&) = default;
  ~PyPlan() {
    if (cache != nullptr && !reads_only) locked(*cache, [&] { plan.reset(); });
  }

  // Requires: the lock. kStale when the step has ended. The cache itself refuses a plan that reads what has
  // changed.
  Status usable() const { return plan ? Status() : Status(Code::kStale, "the plan's step has ended"); }
};

void read(const Argument& argument, PyPlan*& into);

// The parts of cache_binding.cc that make and read plans. Errors: as their Python names document.
PyPlan reserve(const CachePtr& cache, nb::handle requests);
PyPlan plan_read(const CachePtr& cache, nb::handle requests);
Pair read_dense(PyCache& cache, Given<PyPlan*> plan, Given<int64_t> place, Given<int> layer, Given<int64_t> first,
                nb::handle out_k, nb::handle out_v);
void bind_plans(nb::module_& module);

}  // namespace pagedkv::python
