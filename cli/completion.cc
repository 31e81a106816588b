// Completion for bash, made from the commands and options themselves.
#include <fmt/format.h>

#include <cstdio>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/output.h"

namespace pagedkv::cli {
namespace {

std::string choices(const std::string& words) {
  return fmt::format("COMPREPLY=($(compgen -W '{}' -- \"$word\"))", words);
}

// The words after a command, as a case of the script. `path` is what the command line has said so far: "bench
// model".
void add_cases(const CLI::App& command, const std::string& path, std::string& words, std::string& values) {
  std::string next;
  for (const CLI::App* child : command.get_subcommands({})) next += child->get_name() + " ";
  for (const CLI::Option* option : command.get_options()) {
    std::string patterns;
    const auto add_pattern = [&](const std::string& name) {
      patterns += fmt::format("{}'{}:{}'", patterns.empty() ? "" : "|", path, name);
    };
    for (const std::string& name : option->get_lnames()) {
      next += "--" + name + " ";
      add_pattern("--" + name);
    }
    for (const std::string& name : option->get_snames()) add_pattern("-" + name);
    if (option->get_items_expected_max() == 0) continue;  // a flag
    const std::string value = option->get_type_name();
    const std::string reply = value == "FILE"    ? "mapfile -t COMPREPLY < <(compgen -f -- \"$word\")"
                              : value == "MODE"  ? choices("off f32 bf16 q8 q6 q4")
                              : value == "ORDER" ? choices("block_major layer_major")
                                                 : "COMPREPLY=()";
    values += fmt::format("    {}) {}; return ;;\n", patterns, reply);
  }
  words += fmt::format("    '{}') next='{}' ;;\n", path, next);
  for (const CLI::App* child : command.get_subcommands({}))
    add_cases(*child, path.empty() ? child->get_name() : path + " " + child->get_name(), words, values);
}

// Every path of commands, so that the script can tell a command from a value.
void add_paths(const CLI::App& command, const std::string& path, std::string& paths) {
  for (const CLI::App* child : command.get_subcommands({})) {
    const std::string below = path.empty() ? child->get_name() : path + " " + child->get_name();
    paths += (paths.empty() ? "'" : "|'") + below + "'";
    add_paths(*child, below, paths);
  }
}

}  // namespace

int completion(const CLI::App& app) {
  std::string words, values, paths;
  add_cases(app, "", words, values);
  add_paths(app, "", paths);
  print_out(R"(# bash completion for pagedkv. Made by: pagedkv completion bash
_pagedkv() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path='' next='' longer i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    longer="${{path:+$path }}${{COMP_WORDS[i]}}"
    case "$longer" in {}) path=$longer ;; *) break ;; esac
  done
  case "$path:$before" in
{}  esac
  case "$path" in
{}  esac
  COMPREPLY=($(compgen -W "$next" -- "$word"))
}}
complete -o filenames -F _pagedkv pagedkv
)",
            paths, values, words);
  return finish("completion");
}

}  // namespace pagedkv::cli
