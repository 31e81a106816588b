// What a model's K and V take in each format, from the header of its file.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/output.h"
#include "pagedkv/cache.h"
#include "pagedkv/format.h"

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;

struct FormatFigures {
  Format format = Format::kF16;
  Status usable;                  // not ok: why this model cannot have the format; the rest is 0 then
  int64_t bytes_per_token = 0;    // all layers
  int64_t bytes_past_window = 0;  // layers with full attention: the others stop growing at their window
  double padding_per_token = 0;   // of a block's image, spread over its tokens
  int64_t tokens_in_memory = 0;
  int64_t context_bytes = 0;  // blocks that a sequence of `context` tokens holds
};

// A cache of the least size knows the block images and the limits as a full one would.
Result<FormatFigures> figures(const engine::ModelInfo& model, Format format, const InspectOptions& options,
                              Bytes budget, Tokens context) {
  FormatFigures out;
  out.format = format;
  CacheOptions cache_options{.groups = model.groups,
                             .block_size = options.block_size,
                             .num_blocks = Blocks(1),
                             .kv_memory = budget,
                             .fingerprint = {},
                             .isa = {}};
  for (GroupSpec& group : cache_options.groups) {
    group.shape.formats = {format, format};
    for (const int64_t head_dim : {group.shape.head_dim_k, group.shape.head_dim_v}) {
      out.usable = check_head_dim(format, head_dim);
      if (!out.usable.ok()) return out;
    }
    const auto n_layers = int64_t(group.layers.size());
    const int64_t bytes = bytes_per_token(group.shape).n * n_layers;
    out.bytes_per_token += bytes;
    if (group.sliding_window == 0) out.bytes_past_window += bytes;
  }
  auto cache = Cache::create(cache_options);
  if (!cache.ok()) return cache.status();
  int64_t image_bytes = 0;
  for (size_t g = 0; g < model.groups.size(); ++g) {
    const int64_t image = (*cache)->image_bytes(int(g)).n;
    image_bytes += image;
    const int64_t window = model.groups[g].sliding_window;
    int64_t blocks = blocks_for(context, options.block_size).n;
    if (window > 0) blocks = std::min(blocks, blocks_for(Tokens(window), options.block_size).n + 1);
    out.context_bytes += blocks * image;
  }
  out.padding_per_token = double(image_bytes) / double(options.block_size.n) - double(out.bytes_per_token);
  out.tokens_in_memory = (*cache)->capacity().n;
  return out;
}

Json group_json(const GroupSpec& group, int64_t n_head) {
  return Json{{"layers", group.layers},
              {"num_q_heads", n_head},
              {"num_kv_heads", group.shape.num_kv_heads},
              {"head_dim_k", group.shape.head_dim_k},
              {"head_dim_v", group.shape.head_dim_v},
              {"sliding_window", group.sliding_window}};
}

Json format_json(const FormatFigures& f) {
  if (!f.usable.ok()) {
    return Json{{"name", format_name(f.format)},
                {"bytes_per_token", nullptr},
                {"bytes_per_token_past_window", nullptr},
                {"unusable", f.usable.message()}};
  }
  return Json{{"name", format_name(f.format)},
              {"bytes_per_token", f.bytes_per_token},
              {"bytes_per_token_past_window", f.bytes_past_window},
              {"padding_bytes_per_token", f.padding_per_token},
              {"tokens_in_memory", f.tokens_in_memory},
              {"context_bytes", f.context_bytes}};
}

void print(const engine::ModelInfo& model, const InspectOptions& options, const engine::MachineMemory& memory,
           Bytes budget, Tokens context, const std::vector<FormatFigures>& formats) {
  print_out("{}: {}, {} layers, width {}, vocabulary {}, trained context {}, weights {}\n",
            model.name.empty() ? model.path : model.name, model.architecture, model.n_layers,
            with_commas(model.n_embd), with_commas(model.vocab_size), with_commas(model.context_length),
            human_bytes(model.weight_bytes));
  for (const GroupSpec& group : model.groups) {
    const LayerShape& shape = group.shape;
    print_out("  {} layers: {} query heads, {} KV heads, head_dim {}, {}\n", group.layers.size(), model.n_head,
              shape.num_kv_heads,
              shape.head_dim_k == shape.head_dim_v ? std::to_string(shape.head_dim_k)
                                                   : fmt::format("{}/{}", shape.head_dim_k, shape.head_dim_v),
              group.sliding_window > 0 ? fmt::format("sliding window of {}", with_commas(group.sliding_window))
                                       : "full attention");
  }
  print_out("\nK and V over all layers, blocks of {} tokens, {} for them ({}; this process may use {})\n\n",
            options.block_size.n, human_bytes(budget.n), options.kv_memory.n > 0 ? "--kv-memory" : "default",
            human_bytes(memory.limit.n));
  std::vector<std::vector<std::string>> rows = {
      {"format", "bytes/token", "padding", "past window", "tokens that fit", with_commas(context.n) + " tokens"}};
  std::string unusable;
  for (const FormatFigures& f : formats) {
    const std::string name = format_name(f.format);
    if (f.usable.ok()) {
      rows.push_back({name, with_commas(f.bytes_per_token), fmt::format("{:.4g}", f.padding_per_token),
                      with_commas(f.bytes_past_window), with_commas(f.tokens_in_memory),
                      human_bytes(f.context_bytes)});
    } else {
      rows.push_back({name, "-", "-", "-", "-", "-"});
      unusable += fmt::format("{} cannot hold this model: {}\n", name, f.usable.message());
    }
  }
  constexpr auto kLeft = Align::kLeft, kRight = Align::kRight;
  print_out("{}{}", table(rows, {kLeft, kRight, kRight, kRight, kRight, kRight}, "  "), unusable);
}

}  // namespace

int inspect(const InspectOptions& options) {
  const auto model = engine::read_model_info(options.model_path);
  if (!model.ok()) return fail(model.status());
  if (auto text = engine::load_text(*model); !text.ok()) return fail(text.status());  // what `run` would refuse
  const engine::MachineMemory memory = engine::machine_memory(*model);
  const Bytes budget = options.kv_memory.n > 0 ? options.kv_memory : memory.default_kv_memory;
  const Tokens context = options.context.n > 0 ? options.context : Tokens(model->context_length);

  std::vector<FormatFigures> formats;
  for (const Format format : kAllFormats) {
    auto row = figures(*model, format, options, budget, context);
    if (!row.ok()) return fail(row.status());
    formats.push_back(std::move(*row));
  }
  if (options.json) {
    Json out{{"model", model->path},
             {"name", model->name},
             {"architecture", model->architecture},
             {"n_layers", model->n_layers},
             {"vocab_size", model->vocab_size},
             {"context_length", model->context_length},
             {"weight_bytes", model->weight_bytes},
             {"memory_limit", memory.limit.n},
             {"kv_memory", budget.n},
             {"block_size", options.block_size.n},
             {"context", context.n},
             {"groups", Json::array()},
             {"formats", Json::array()}};
    for (const GroupSpec& group : model->groups) out["groups"].push_back(group_json(group, model->n_head));
    for (const FormatFigures& f : formats) out["formats"].push_back(format_json(f));
    print_out("{}\n", out.dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    print(*model, options, memory, budget, context, formats);
  }
  return finish("inspect");
}

}  // namespace pagedkv::cli
