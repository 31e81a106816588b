#include "bench/measure.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "bench/bench.h"
#include "engine/engine.h"

namespace pagedkv::bench {
namespace {

constexpr int64_t kHuge = int64_t{2} << 20;

using Words = uint64_t __attribute__((vector_size(64)));

#if defined(__x86_64__)
#define PKV_EVERY_ISA __attribute__((target_clones("avx512f", "avx2,fma", "default")))
#else
#define PKV_EVERY_ISA __attribute__((noinline))
#endif

PKV_EVERY_ISA uint64_t read_all(const std::byte* data, int64_t bytes) {
  Words a{}, b{}, c{}, d{};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    __builtin_prefetch(data + i + 4096);
    __builtin_prefetch(data + i + 4160);
    __builtin_prefetch(data + i + 4224);
    __builtin_prefetch(data + i + 4288);
    Words w[4];
    std::memcpy(w, data + i, 256);
    a |= w[0];
    b |= w[1];
    c |= w[2];
    d |= w[3];
  }
  a |= b | c | d;
  uint64_t all = 0;
  for (int i = 0; i < 8; ++i) all |= a[i];
  return all;
}

std::atomic<uint64_t> sink{0};  // keeps results alive

}  // namespace

// Access is given to the inner part alone, so that it is a mapping of its own, which smaps tells by itself.
Pages::Pages(int64_t bytes, PageSize pages) {
  const int64_t size = (bytes + kHuge - 1) / kHuge * kHuge;
  if (size <= 0) return;
  mapping_size_ = size + 2 * kHuge;
  mapping_ = mmap(nullptr, size_t(mapping_size_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(mapping_);
  auto* inner = static_cast<std::byte*>(mapping_) + (uintptr_t(kHuge) - begin % uintptr_t(kHuge));
  if (mprotect(inner, size_t(size), PROT_READ | PROT_WRITE) != 0) return;
  madvise(inner, size_t(size), pages == PageSize::k2MiB ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(inner, 1, size_t(size));
  data_ = inner;
  size_ = size;
}

Pages::~Pages() {
  if (mapping_ != nullptr) munmap(mapping_, size_t(mapping_size_));
}

std::optional<double> on_huge_pages(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream file("/proc/self/smaps");
  bool inside = false;
  double rss = 0;
  for (std::string line; std::getline(file, line);) {
    unsigned long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      inside = wanted >= begin && wanted < end;
    else if (inside && std::sscanf(line.c_str(), "Rss: %lu kB", &kib) == 1)
      rss = double(kib);
    else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1 && rss > 0)
      return double(kib) / rss;
  }
  return std::nullopt;
}

std::string page_note(const char* what, std::optional<double> huge) {
  if (!huge || *huge > 0.98) return "";
  char text[120];
  std::snprintf(text, sizeof text, "only %.0f %% of %s is on 2 MiB pages: reading it is slower", *huge * 100, what);
  return text;
}

int64_t read_buffer_bytes() {
  const int64_t most = engine::machine_memory({}).limit.n / 8;
  return std::min({int64_t{1} << 29, 16 * last_level_cache(), most});
}

double read_bandwidth(Team& team, const Pages& buffer) {
  const double begin = now_seconds();
  team.run([&](Part part) {
    const int64_t share = buffer.size() / part.count / 256 * 256;
    sink += read_all(buffer.data() + share * part.index, share);
  });
  return double(buffer.size()) / (now_seconds() - begin);
}

double read_rate(int threads) {
  const Pages buffer(read_buffer_bytes());
  if (buffer.size() == 0) return 0;
  Team team(threads);
  double best = 0;
  for (int sample = 0; sample < 5; ++sample) best = std::max(best, read_bandwidth(team, buffer));
  return best;
}

int64_t last_level_cache() {
  // The slice that this core can use. sysconf() adds up the slices of the whole socket, also those of other guests.
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  int64_t kib = 0;
  if (file >> kib && kib > 0) return kib << 10;
  return int64_t{32} << 20;
}

}  // namespace pagedkv::bench
