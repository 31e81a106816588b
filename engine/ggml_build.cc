// Which ggml this is.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include "engine/engine.h"

namespace pagedkv::engine {

GgmlBuild ggml_build() {
  GgmlBuild build{.version = ggml_version(), .features = {}};
  const auto features = reinterpret_cast<ggml_backend_get_features_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_get_features"));
  if (features == nullptr) return build;
  for (const ggml_backend_feature* f = features(ggml_backend_cpu_reg()); f != nullptr && f->name != nullptr; ++f)
    build.features.emplace_back(f->name, f->value);
  return build;
}

}  // namespace pagedkv::engine
