// pagedkv run | serve | perplexity | inspect | info | bench | completion. Exit codes: 0 done, 1 it failed, 2 the
// command line cannot be right, 130 Ctrl-C.
#include <fmt/format.h>

#include <exception>
#include <new>
#include <sstream>
#include <string>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/output.h"

namespace pagedkv::cli {
namespace {

const std::string kVersion = "pagedkv " PAGEDKV_VERSION;

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& help) {
  CLI::App* command = app.add_subcommand(name, help);
  command->set_version_flag("--version", kVersion, "print the version and exit");
  return command;
}

int command_line(int argc, char** argv) {
  install_notices();
  CLI::App app("Runs GGUF models on a paged, quantized KV cache, and measures it.", "pagedkv");
  app.set_version_flag("--version", kVersion, "print the version and exit");
  app.require_subcommand(1);

  RunOptions run_options;
  CLI::App* run_command = add_command(app, "run", "answer one prompt; stdout gets the answer and nothing else");
  add_run_options(*run_command, run_options);

  ServeOptions serve_options;
  CLI::App* serve_command =
      add_command(app, "serve", "an OpenAI-compatible server, with a page to look at the pool");
  add_serve_options(*serve_command, serve_options);

  PerplexityOptions perplexity_options;
  CLI::App* perplexity_command = add_command(app, "perplexity", "how well the model predicts a text, by format");
  add_perplexity_options(*perplexity_command, perplexity_options);

  InspectOptions inspect_options;
  CLI::App* inspect_command = add_command(app, "inspect", "what a model's K and V take in each format");
  add_inspect_options(*inspect_command, inspect_options);

  InfoOptions info_options;
  CLI::App* info_command = add_command(app, "info", "this machine: CPU, kernels, memory and its speed");
  add_info_options(*info_command, info_options);

  CLI::App* completion_command = add_command(app, "completion", "a completion script for a shell, on stdout");
  completion_command->require_subcommand(1);
  add_command(*completion_command, "bash", "for bash: source <(pagedkv completion bash)");

  CLI::App* bench_command = add_command(app, "bench", "measure");
  bench_command->require_subcommand(1);
  BenchCommand benches[5] = {{.kind = BenchCommand::Kind::kLimits, .options = {}},
                             {.kind = BenchCommand::Kind::kCache, .options = {}},
                             {.kind = BenchCommand::Kind::kKernels, .options = {}},
                             {.kind = BenchCommand::Kind::kProducts, .options = {}},
                             {.kind = BenchCommand::Kind::kModel, .options = {}}};
  CLI::App* bench_commands[5] = {
      add_command(*bench_command, "limits", "what the machine reads and multiplies at most"),
      add_command(*bench_command, "cache", "blocks, block tables and prefix lookup"),
      add_command(*bench_command, "kernels", "append and attend over packed blocks"),
      add_command(*bench_command, "products", "matrix products of quantized weights"),
      add_command(*bench_command, "model", "prefill and decode of a model")};
  for (int i = 0; i < 5; ++i) add_bench_options(*bench_commands[i], benches[i]);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    std::ostringstream text;
    app.exit(asked, text, text);
    out(text.str());
    return finish("pagedkv");
  } catch (const CLI::ParseError& error) {
    std::string name = "pagedkv";
    CLI::App* command = &app;
    while (!command->get_subcommands().empty()) {
      command = command->get_subcommands().front();
      name += " " + command->get_name();
    }
    // CLI11 would only say that a command is missing.
    const auto unknown = command->remaining();
    if (command->get_require_subcommand_min() > 0 && !unknown.empty())
      return fail_usage(fmt::format("{} has no command or option {}", name, unknown.front()), name);
    return fail_usage(error.what(), name);
  }
  if (run_command->parsed()) return run(run_options);
  if (serve_command->parsed()) return serve(serve_options);
  if (perplexity_command->parsed()) return perplexity(perplexity_options);
  if (inspect_command->parsed()) return inspect(inspect_options);
  if (info_command->parsed()) return info(info_options);
  if (completion_command->parsed()) return completion(app);
  for (int i = 0; i < 5; ++i)
    if (bench_commands[i]->parsed()) return bench(benches[i]);
  return fail_usage("no command", "pagedkv");
}

}  // namespace
}  // namespace pagedkv::cli

int main(int argc, char** argv) {
  using namespace pagedkv;
  cli::own_streams();
  try {
    return cli::command_line(argc, argv);
  } catch (const std::bad_alloc&) {
    return cli::fail(Status(Code::kNoMemory, "[memory] the system gave no more (ulimit -v, cgroup or RAM)"));
  } catch (const std::exception& error) {
    return cli::fail(Status(Code::kInternal, error.what()));
  }
}
