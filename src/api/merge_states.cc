#include <cmath>
#include <limits>

#include "pagedkv/attention.h"

namespace pagedkv {

void merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, int64_t n_rows,
                  int64_t head_dim) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < n_rows; ++row) {
    float* a = out_a + row * head_dim;
    const float* b = out_b + row * head_dim;
    if (lse_b[row] == kEmpty) continue;  // b saw no key: a keeps its bits, and (-inf) - (-inf) is never computed
    if (lse_a[row] == kEmpty) {
      for (int64_t i = 0; i < head_dim; ++i) a[i] = b[i];
      lse_a[row] = lse_b[row];
      continue;
    }
    const double top = std::fmax(lse_a[row], lse_b[row]);
    const double weight_a = std::exp(lse_a[row] - top), weight_b = std::exp(lse_b[row] - top);
    const double sum = weight_a + weight_b;
    const double share_a = weight_a / sum, share_b = weight_b / sum;
    for (int64_t i = 0; i < head_dim; ++i) a[i] = float(share_a * a[i] + share_b * b[i]);
    lse_a[row] = float(top + std::log(sum));
  }
}

}  // namespace pagedkv
