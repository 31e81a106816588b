// Threads and memory of a model, from what the process may use of the machine.
#include "pagedkv/machine.h"

#include <algorithm>
#include <limits>

#include "engine/engine.h"

namespace pagedkv::engine {

int default_threads() {
  const int quota = cgroup_cpus();
  const int cpus = affinity_cpus();
  return std::max(1, quota > 0 ? std::min(quota, cpus) : cpus);
}

MachineMemory machine_memory(const ModelInfo& model) {
  const int64_t ram = ram_bytes(), cgroup = cgroup_memory();
  const int64_t limit = std::min(ram, cgroup);
  const int64_t rest = std::max<int64_t>(limit - model.weight_bytes, 0);
  // Large weights would leave nothing of a half; an eighth of what they do leave still lets the model run.
  const int64_t kv = std::max(limit / 2 - model.weight_bytes, rest / 8);
  MachineMemory memory{.limit = Bytes(limit), .default_kv_memory = Bytes(kv), .ram = Bytes(ram)};
  if (cgroup != std::numeric_limits<int64_t>::max()) memory.cgroup = Bytes(cgroup);
  return memory;
}

}  // namespace pagedkv::engine
