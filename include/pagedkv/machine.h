// What this process may use of the machine: memory and CPUs, by cgroup limits (v1 and v2) and affinity. Any thread.
#pragma once

#include <cstdint>
#include <string>

#include "pagedkv/export.h"

namespace pagedkv {

// Where to look. Tests point it at files of their own.
struct MachineFiles {
  std::string meminfo = "/proc/meminfo";
  std::string self_cgroup = "/proc/self/cgroup";
  std::string cgroup_root = "/sys/fs/cgroup";
};

PKV_API int64_t ram_bytes(const MachineFiles& files = {});
// The tightest cgroup limit in bytes; INT64_MAX when there is none or it cannot be read.
PKV_API int64_t cgroup_memory(const MachineFiles& files = {});
// The smaller of the two.
PKV_API int64_t memory_limit(const MachineFiles& files = {});
// Bytes that the tightest cgroup still allows this process to take; INT64_MAX when none limits it. Clean page cache
// counts as free, because the kernel drops it first.
PKV_API int64_t cgroup_room(const MachineFiles& files = {});

// CPUs worth of time per second that the tightest cgroup quota allows, rounded up; 0: no quota.
PKV_API int cgroup_cpus(const MachineFiles& files = {});
// CPUs in this thread's affinity mask; at least 1.
PKV_API int affinity_cpus();

}  // namespace pagedkv
