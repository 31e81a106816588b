// A model file ready to compute: validated hyper-parameters and tensors that point into the mapping.
#pragma once

#include <ggml-cpp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/architecture.h"
#include "engine/engine.h"
#include "engine/gguf_file.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// Const members: any thread.
class Model {
 public:
  // Validates the file and binds its tensors; no weight is read or copied yet.
  // Errors: those of read_model_info.
  static Result<std::unique_ptr<Model>> load(const std::string& path);

  // Reads every weight page once, so that the first step does not wait for the disk. `progress` gets 0 to 1.
  void read_in(const std::function<void(double fraction)>& progress) const;

  // The weights of matrix products: not norms, nor an embedding that is only looked up.
  std::vector<const ggml_tensor*> product_weights() const;

  const ModelInfo& info() const { return info_; }
  const HyperParameters& hyper_parameters() const { return hyper_parameters_; }
  const Architecture& architecture() const { return *architecture_; }
  const Weights& weights() const { return weights_; }

 private:
  Model() = default;

  std::shared_ptr<const GgufFile> file_;  // the tensors' memory
  ModelInfo info_;
  HyperParameters hyper_parameters_;
  const Architecture* architecture_ = nullptr;
  ggml_backend_buffer_ptr buffer_;  // the mapping, as ggml sees it
  ggml_context_ptr context_;        // the tensors' descriptions
  Weights weights_;
};

}  // namespace pagedkv::engine
