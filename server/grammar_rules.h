// The rules of a grammar (GBNF) of JSON texts, as they are gathered.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "server/automaton.h"

namespace pagedkv::server {

// A GBNF literal that matches `text`.
std::string literal(std::string_view text);

// One thread.
class GrammarRules {
 public:
  // A rule that grammars share, with those that it needs: ws, char, string, integer, number, boolean, null, value,
  // object, array. Returns the name.
  std::string use(const std::string& name);
  void add(const std::string& name, const std::string& rule);
  // Rules for the texts that an automaton with a state accepts, characters spelled as inside a JSON string, each in
  // one way alone. Returns the first one's name.
  std::string add(const Automaton& automaton);

  const std::string& text() const { return text_; }
  bool too_large() const { return text_.size() > kMaxBytes; }

 private:
  static constexpr size_t kMaxBytes = 8 << 20;

  std::string text_;
  std::set<std::string> used_;
  int n_automata_ = 0;
};

}  // namespace pagedkv::server
