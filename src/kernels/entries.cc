// The table of kernel entries, best first.
#include "kernels/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pagedkv::kernels {
namespace {

// __builtin_cpu_supports asks the operating system's side too: without its saved registers a set does not count.
#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}
bool has_f16c() {  // whose name clang 14 does not know; its registers are those of AVX2
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#else
bool has_avx512() { return false; }
bool has_avx512_vnni() { return false; }
bool has_avx2() { return false; }
#endif
bool has_neon() { return true; }  // part of AArch64; elsewhere there is no code for it
bool has_anything() { return true; }

struct Table {
  Entry entries[5];
  size_t size = 0;

  Table() {
    add("avx512_vnni", has_avx512_vnni, avx512_vnni_functions());
    add("avx512", has_avx512, avx512_functions());
    add("avx2", has_avx2, avx2_functions());
    add("neon", has_neon, neon_functions());
    add("scalar", has_anything, scalar_functions());
  }
  // A set that this build has no code for stays out.
  void add(std::string_view name, bool (*supported)(), const IsaFunctions* f) {
    if (f == nullptr) return;
    entries[size++] = {.name = name,
                       .supported = supported,
                       .has_byte_dots = name == "avx512_vnni",
                       .append = f->append,
                       .attend = f->attend,
                       .merge = f->merge,
                       .part_scratch_bytes = f->part_scratch_bytes,
                       .quantize = f->quantize,
                       .dequantize = f->dequantize};
  }
};

}  // namespace

std::span<const Entry> entries() {
  static const Table table;
  return {table.entries, table.size};
}

const Entry* find_entry(std::string_view name) {
  for (const Entry& entry : entries()) {
    if ((name.empty() || entry.name == name) && entry.supported()) return &entry;
  }
  return nullptr;
}

}  // namespace pagedkv::kernels
