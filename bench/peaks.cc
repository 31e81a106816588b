#include "bench/peaks.h"

#include <array>
#include <atomic>
#include <span>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace pagedkv::bench {
namespace {

// Independent chains: enough to hide the latency of one step, few enough for 16 registers.
constexpr int kChains = 12;

// Every body runs `rounds` rounds and gives a value that depends on all of them.
using Body = int64_t (*)(int64_t rounds);
struct Path {
  const char* name;
  bool runs_here;
  Body body;
  int64_t ops_per_round;
};

// The compiler must not see that an operand is the same in every round, or it multiplies once.
#define PKV_FRESH(x) asm volatile("" : "+x"(x))

// --- plain: what the compiler makes of it for the oldest CPU of the architecture ------------------------------
using Floats = float __attribute__((vector_size(16)));

int64_t f32_plain(int64_t rounds) {
  Floats acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = Floats{} + float(i + 1);
  const Floats x = Floats{} + 0.999999f, y = Floats{} + 1e-6f;
  for (int64_t r = 0; r < rounds; ++r)
    for (Floats& chain : acc) chain = chain * x + y;
  float sum = 0;
  for (const Floats& chain : acc) sum += chain[0];
  return int64_t(sum);
}

constexpr int kPlainBytes = 1024;
int64_t int8_plain(int64_t rounds) {
  std::array<int8_t, kPlainBytes> a, b;
  a.fill(3), b.fill(5);
  uint32_t sum = 0;
  for (int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : : "r"(a.data()), "r"(b.data()) : "memory");
    for (size_t i = 0; i < kPlainBytes; ++i) sum += uint32_t(int32_t(a[i]) * b[i]);
  }
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) int64_t f32_avx512(int64_t rounds) {
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(float(i + 1));
  const __m512 x = _mm512_set1_ps(0.999999f), y = _mm512_set1_ps(1e-6f);
  for (int64_t r = 0; r < rounds; ++r)
    for (__m512& chain : acc) chain = _mm512_fmadd_ps(chain, x, y);
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  return int64_t(acc[0][0]);
}

__attribute__((target("avx2,fma"))) int64_t f32_avx2(int64_t rounds) {
  __m256 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_set1_ps(float(i + 1));
  const __m256 x = _mm256_set1_ps(0.999999f), y = _mm256_set1_ps(1e-6f);
  for (int64_t r = 0; r < rounds; ++r)
    for (__m256& chain : acc) chain = _mm256_fmadd_ps(chain, x, y);
  for (int i = 1; i < kChains; ++i) acc[0] = _mm256_add_ps(acc[0], acc[i]);
  return int64_t(acc[0][0]);
}

__attribute__((target("avx512f,avx512vnni"))) int64_t int8_vnni(int64_t rounds) {
  __m512i acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_epi32(i);
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  for (int64_t r = 0; r < rounds; ++r)
    for (__m512i& chain : acc) chain = _mm512_dpbusd_epi32(chain, a, b);
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_epi32(acc[0], acc[i]);
  return int64_t(acc[0][0]);
}

__attribute__((target("avx2"))) int64_t int8_avx2(int64_t rounds) {
  __m256i acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_set1_epi32(i);
  __m256i a = _mm256_set1_epi8(3);
  const __m256i b = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
  for (int64_t r = 0; r < rounds; ++r)
    for (__m256i& chain : acc) {
      PKV_FRESH(a);
      chain = _mm256_add_epi32(chain, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm256_add_epi32(acc[0], acc[i]);
  return int64_t(acc[0][0]);
}

__attribute__((target("avx512f,avx512bf16"))) int64_t bf16_avx512(int64_t rounds) {
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(float(i + 1));
  const auto a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3380);  // 1 and 2^-24
  for (int64_t r = 0; r < rounds; ++r)
    for (__m512& chain : acc) chain = _mm512_dpbf16_ps(chain, a, b);
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  return int64_t(acc[0][0]);
}

std::array<Path, 3> f32_paths() {
  return {{{"AVX-512 vfmadd", __builtin_cpu_supports("avx512f") != 0, f32_avx512, kChains * 32},
           {"AVX2 vfmadd", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), f32_avx2, kChains * 16},
           {"SSE mulps, addps", true, f32_plain, kChains * 8}}};
}
std::array<Path, 3> int8_paths() {
  return {{{"AVX-512 VNNI vpdpbusd", __builtin_cpu_supports("avx512vnni") != 0, int8_vnni, kChains * 128},
           {"AVX2 vpmaddubsw, vpmaddwd", __builtin_cpu_supports("avx2") != 0, int8_avx2, kChains * 64},
           {"plain C", true, int8_plain, kPlainBytes * 2}}};
}
std::array<Path, 1> bf16_paths() {
  return {{{"AVX512_BF16 vdpbf16ps", __builtin_cpu_supports("avx512bf16") != 0, bf16_avx512, kChains * 64}}};
}
constexpr const char* kNoBf16 = "this CPU has no AVX512_BF16";

#else
std::array<Path, 1> f32_paths() { return {{{"plain C, vectors of 4", true, f32_plain, kChains * 8}}}; }
std::array<Path, 0> bf16_paths() { return {}; }
constexpr const char* kNoBf16 = "not written for this architecture";

#if defined(__aarch64__)
__attribute__((target("arch=armv8.2-a+dotprod"))) int64_t int8_sdot(int64_t rounds) {
  int32x4_t acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = vdupq_n_s32(i);
  const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
  for (int64_t r = 0; r < rounds; ++r)
    for (int32x4_t& chain : acc) chain = vdotq_s32(chain, a, b);
  for (int i = 1; i < kChains; ++i) acc[0] = vaddq_s32(acc[0], acc[i]);
  return vgetq_lane_s32(acc[0], 0);
}
std::array<Path, 2> int8_paths() {
  return {{{"NEON sdot", (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0, int8_sdot, kChains * 32},
           {"plain C", true, int8_plain, kPlainBytes * 2}}};
}
#else
std::array<Path, 1> int8_paths() { return {{{"plain C", true, int8_plain, kPlainBytes * 2}}}; }
#endif
#endif

std::atomic<int64_t> sink{0};  // keeps results alive

Peak peak_of(Team& team, std::span<const Path> paths, const char* missing) {
  constexpr double kSampleSeconds = 0.002;  // short: some of them shall miss what else the machine does
  constexpr int kSamples = 100;
  for (const Path& path : paths) {
    if (!path.runs_here) continue;
    const auto seconds = [&](int64_t rounds) {
      const double begin = now_seconds();
      team.run([&](Part) { sink += path.body(rounds); });
      return now_seconds() - begin;
    };
    int64_t rounds = 1000;
    while (seconds(rounds) < kSampleSeconds) rounds *= 2;
    double best = 0;
    for (int sample = 0; sample < kSamples; ++sample)
      best = std::max(best, double(rounds) * double(path.ops_per_round) * team.size() / seconds(rounds));
    return {.ops = best, .path = path.name, .missing = ""};
  }
  return {.ops = 0, .path = "", .missing = missing};
}

}  // namespace

Peak f32_peak(Team& team) { return peak_of(team, f32_paths(), ""); }
Peak int8_peak(Team& team) { return peak_of(team, int8_paths(), ""); }
Peak bf16_peak(Team& team) { return peak_of(team, bf16_paths(), kNoBf16); }

}  // namespace pagedkv::bench
