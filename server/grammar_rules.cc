#include "server/grammar_rules.h"

#include <cstdio>
#include <map>
#include <vector>

namespace pagedkv::server {
namespace {

struct Shared {
  std::string rule;
  std::vector<std::string> needs;  // what it names
};

// White space is limited: a model that may write endless blanks sometimes does. Half a surrogate pair is no
// character, and a number that a double cannot hold no number.
const std::map<std::string, Shared> kShared = {
    {"ws", {R"x(| " " | "\n" [ \t]{0,20})x", {}}},
    {"char", {R"x([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" unit))x", {"unit"}}},
    {"unit",
     {R"x([0-9a-cA-CefEF] hex{3} | [dD] [0-7] hex{2} | [dD] [89abAB] hex{2} "\\u" [dD] [c-fC-F] hex{2})x",
      {"hex"}}},
    {"hex", {R"x([0-9a-fA-F])x", {}}},
    {"string", {R"x("\"" char* "\"")x", {"char"}}},
    {"integral", {R"x([0] | [1-9] [0-9]{0,15})x", {}}},
    {"integer", {R"x("-"? integral)x", {"integral"}}},
    {"number", {R"x("-"? integral ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?)x", {"integral"}}},
    {"boolean", {R"x("true" | "false")x", {}}},
    {"null", {R"x("null")x", {}}},
    {"value",
     {R"x(object | array | string | number | boolean | null)x",
      {"object", "array", "string", "number", "boolean", "null"}}},
    {"object",
     {R"x("{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}")x",
      {"ws", "string", "value"}}},
    {"array", {R"x("[" ws (value (ws "," ws value)*)? ws "]")x", {"ws", "value"}}},
};

std::string escaped(uint32_t character) {
  char text[16];
  std::snprintf(text, sizeof text, "\\U%08X", character);
  return text;
}

// The ways to spell a character of a set inside a JSON string, each of them a sequence of GBNF.
class Spellings {
 public:
  void add(uint32_t low, uint32_t high) {
    for (; low <= high && low < 0x20; ++low) add_control(low);
    const uint32_t special[] = {'"', '\\', 0x7f};
    for (const uint32_t c : special) {
      if (c < low || c > high) continue;
      if (low < c) plain_ += escaped(low) + "-" + escaped(c - 1);
      low = c + 1;
      if (c == 0x7f) {
        odd_.emplace_back("\"\\\\u007f\"");
      } else {
        named_ += c == '"' ? "\"" : "\\\\";
      }
    }
    if (low <= high) plain_ += escaped(low) + "-" + escaped(high);
  }

  std::vector<std::string> all() const {
    std::vector<std::string> out = odd_;
    if (!plain_.empty()) out.push_back("[" + plain_ + "]");
    if (!named_.empty()) out.push_back("\"\\\\\" [" + named_ + "]");
    for (size_t i = 0; i < 2; ++i)
      if (!hexadecimal_[i].empty()) out.push_back("\"\\\\u00" + std::to_string(i) + "\" [" + hexadecimal_[i] + "]");
    return out;
  }

 private:
  void add_control(uint32_t c) {
    static constexpr std::string_view kControls = "\b\f\n\r\t", kNames = "bfnrt";
    const size_t which = kControls.find(char(c));
    if (which != std::string_view::npos) {
      named_ += kNames[which];
    } else {
      hexadecimal_[c / 16] += "0123456789abcdef"[c % 16];
    }
  }

  std::string plain_, named_, hexadecimal_[2];
  std::vector<std::string> odd_;
};

}  // namespace

std::string literal(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string GrammarRules::use(const std::string& name) {
  if (!used_.insert(name).second) return name;
  const Shared& shared = kShared.at(name);
  add(name, shared.rule);
  for (const std::string& other : shared.needs) use(other);
  return name;
}

void GrammarRules::add(const std::string& name, const std::string& rule) {
  if (!too_large()) text_ += name + " ::= " + rule + "\n";
}

std::string GrammarRules::add(const Automaton& automaton) {
  const std::string prefix = "a" + std::to_string(++n_automata_) + "-";
  for (size_t s = 0; s < automaton.states.size(); ++s) {
    const Automaton::State& state = automaton.states[s];
    std::map<uint32_t, Spellings> targets;
    for (const Automaton::Arc& arc : state.arcs) targets[arc.target].add(arc.low, arc.high);
    std::string rule;
    for (const auto& [target, spellings] : targets) {
      const Automaton::State& next = automaton.states[target];
      const bool last = next.accepts && next.arcs.empty();
      for (const std::string& spelling : spellings.all())
        rule += (rule.empty() ? "" : " | ") + spelling + (last ? "" : " " + prefix + std::to_string(target));
    }
    if (state.accepts) rule += rule.empty() ? "\"\"" : " | \"\"";
    add(prefix + std::to_string(s), rule);
  }
  return prefix + "0";
}

}  // namespace pagedkv::server
