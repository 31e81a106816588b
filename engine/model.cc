#include "engine/model.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/sha256.h"
#include "engine/vocabulary.h"

namespace pagedkv::engine {
namespace {

constexpr int64_t kSampleBytes = 4096;
constexpr int64_t kReadStep = 8 << 20;  // bytes between two calls of progress

// SHA-256 over the header, the file's size, and of each tensor the first, middle and last 4 KiB. Reading all
// weights would take seconds on large models; training, merging or requantizing changes every matrix all over, so
// that these samples tell two files apart. The rotary setting is in the header.
Result<std::string> fingerprint_of(const GgufFile& file) {
  Sha256 hash;
  const auto size = uint64_t(file.bytes().size());
  hash.add(&size, sizeof size);
  hash.add(file.bytes().data(), size_t(file.data_offset()));
  for (const GgufTensor& t : file.tensors()) {
    const std::span<const std::byte> data = file.data(t);
    const int64_t n = std::min<int64_t>(kSampleBytes, t.n_bytes);
    for (int64_t at : {int64_t{0}, (t.n_bytes - n) / 2, t.n_bytes - n}) {
      hash.add(data.data() + at, size_t(n));
    }
  }
  const auto key = hash.finish();
  if (!key) return Status(Code::kUnavailable, "SHA-256 of the model failed in OpenSSL");
  return "sha256:" + hex(*key);
}

struct Inspected {
  const Architecture* architecture = nullptr;
  HyperParameters hyper_parameters;
  ModelInfo info;
};

// All checks of a file that go past its format.
Result<Inspected> inspect(const GgufFile& file) {
  Inspected out;
  auto architecture = find_architecture(file);
  if (!architecture.ok()) return architecture.status();
  out.architecture = *architecture;
  auto h = out.architecture->read(file);
  if (!h.ok()) return h.status();
  if (Status s = check_tensors(file, *out.architecture, *h); !s.ok()) return s;
  if (Status s = check_vocabulary(file); !s.ok()) return s;
  auto name = file.text("general.name");
  if (!name.ok()) return name.status();
  auto fingerprint = fingerprint_of(file);
  if (!fingerprint.ok()) return fingerprint.status();

  out.hyper_parameters = *h;
  out.info = {.path = file.path(),
              .architecture = std::string(out.architecture->name()),
              .name = name->value_or(""),
              .n_layers = h->n_layers,
              .n_embd = h->n_embd,
              .n_head = h->n_head,
              .vocab_size = h->vocab_size,
              .context_length = h->context_length,
              .weight_bytes = 0,
              .groups = attention_groups(*h),
              .fingerprint = *fingerprint};
  for (const GgufTensor& t : file.tensors()) out.info.weight_bytes += t.n_bytes;
  return out;
}

Result<Inspected> inspect_named(const GgufFile& file) {
  auto out = inspect(file);
  if (!out.ok()) return Status(out.status().code(), file.path() + ": " + out.status().message());
  return out;
}

}  // namespace

Result<ModelInfo> read_model_info(const std::string& path) {
  auto file = GgufFile::open(path);
  if (!file.ok()) return file.status();
  auto inspected = inspect_named(**file);
  if (!inspected.ok()) return inspected.status();
  return inspected->info;
}

Result<std::unique_ptr<Model>> Model::load(const std::string& path) {
  auto file = GgufFile::open(path);
  if (!file.ok()) return file.status();
  auto inspected = inspect_named(**file);
  if (!inspected.ok()) return inspected.status();

  std::unique_ptr<Model> model(new Model);
  model->file_ = *file;
  model->info_ = std::move(inspected->info);
  model->hyper_parameters_ = std::move(inspected->hyper_parameters);
  model->architecture_ = inspected->architecture;

  const std::span<const std::byte> bytes = model->file_->bytes();
  const std::span<const GgufTensor> tensors = model->file_->tensors();
  model->context_.reset(
      ggml_init({.mem_size = ggml_tensor_overhead() * tensors.size(), .mem_buffer = nullptr, .no_alloc = true}));
  // ggml wants a writable pointer and never writes weights; the mapping is read-only, which would tell.
  auto* base = const_cast<std::byte*>(bytes.data());
  model->buffer_.reset(ggml_backend_cpu_buffer_from_ptr(base, bytes.size()));
  if (!model->context_ || !model->buffer_) return Status(Code::kNoMemory, path + ": no memory for the tensors");
  ggml_backend_buffer_set_usage(model->buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  for (const GgufTensor& t : tensors) {
    ggml_tensor* bound = ggml_new_tensor(model->context_.get(), t.type, t.n_dims, t.ne);
    ggml_set_name(bound, t.name.c_str());
    if (ggml_backend_tensor_alloc(model->buffer_.get(), bound, base + t.offset) != GGML_STATUS_SUCCESS) {
      return Status(Code::kInternal, path + ": ggml did not take tensor '" + t.name + "'");
    }
    model->weights_.emplace(t.name, bound);
  }
  return model;
}

std::vector<const ggml_tensor*> Model::product_weights() const {
  std::vector<const ggml_tensor*> out;
  const bool tied = !weights_.contains("output.weight");
  for (ggml_tensor* t = ggml_get_first_tensor(context_.get()); t; t = ggml_get_next_tensor(context_.get(), t))
    if (t->ne[1] > 1 && (tied || std::string_view(t->name) != "token_embd.weight")) out.push_back(t);
  return out;
}

void Model::read_in(const std::function<void(double fraction)>& progress) const {
  const std::span<const std::byte> bytes = file_->bytes();
  const auto begin = size_t(file_->data_offset());
  auto* base = const_cast<std::byte*>(bytes.data());
  madvise(base, bytes.size(), MADV_WILLNEED);  // a hint: no harm if refused
  const auto page = size_t(sysconf(_SC_PAGESIZE));
  for (size_t at = begin; at < bytes.size();) {
    const size_t end = std::min(at + kReadStep, bytes.size());
    for (; at < end; at += page) static_cast<void>(*static_cast<const volatile std::byte*>(base + at));
    at = end;
    if (progress) progress(double(end - begin) / double(bytes.size() - begin));
  }
}

}  // namespace pagedkv::engine
