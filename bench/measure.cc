#include "bench/measure.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <fstream>

#include "bench/bench.h"
#include "engine/engine.h"

namespace pagedkv::bench {
namespace {

constexpr int64_t kHuge = int64_t{2} << 20;

using Floats = float __attribute__((vector_size(64)));
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

// Twelve independent chains hide the latency of a fused multiply-add.
PKV_EVERY_ISA float multiply_add(int64_t rounds, float seed) {
  Floats acc[12];
  for (int i = 0; i < 12; ++i) acc[i] = Floats{} + seed * float(i + 1);
  const Floats x = Floats{} + 0.999999f, y = Floats{} + 1e-6f;
  for (int64_t r = 0; r < rounds; ++r)
    for (Floats& chain : acc) chain = chain * x + y;
  float sum = 0;
  for (const Floats& chain : acc) sum += chain[0];
  return sum;
}

std::atomic<uint64_t> sink{0};  // keeps results alive

}  // namespace

HugeBuffer::HugeBuffer(int64_t bytes) : size_((bytes + kHuge - 1) / kHuge * kHuge) {
  data_ = static_cast<std::byte*>(std::aligned_alloc(size_t(kHuge), size_t(size_)));
  if (data_ == nullptr) size_ = 0;
  if (size_ == 0) return;
  madvise(data_, size_t(size_), MADV_HUGEPAGE);
  std::memset(data_, 1, size_t(size_));
}

HugeBuffer::~HugeBuffer() { std::free(data_); }

double read_bandwidth(Team& team, const HugeBuffer& buffer) {
  const double begin = now_seconds();
  team.run([&](Part part) {
    const int64_t share = buffer.size() / part.count / 256 * 256;
    sink += read_all(buffer.data() + share * part.index, share);
  });
  return double(buffer.size()) / (now_seconds() - begin);
}

double read_rate(int threads) {
  // A share of the memory that this process may use, where that is less: being killed for a measurement helps
  // nobody.
  const int64_t most = engine::machine_memory({}).limit.n / 8;
  const HugeBuffer buffer(std::min({int64_t{1} << 29, 16 * last_level_cache(), most}));
  if (buffer.size() == 0) return 0;
  Team team(threads);
  double best = 0;
  for (int sample = 0; sample < 5; ++sample) best = std::max(best, read_bandwidth(team, buffer));
  return best;
}

double fma_peak(Team& team) {
  constexpr int64_t kRounds = 5'000'000;
  double best = 0;
  for (int sample = 0; sample < 5; ++sample) {
    const double begin = now_seconds();
    team.run([&](Part part) { sink += uint64_t(multiply_add(kRounds, float(part.index + 1))); });
    best = std::max(best, double(kRounds) * 12 * 16 * team.size() / (now_seconds() - begin));
  }
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
