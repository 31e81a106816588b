// Sets of texts that a deterministic automaton accepts: what a schema's strings and numbers may be. Both keywords
// of a schema hold where the product of their automata does.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pagedkv::server {

inline constexpr uint32_t kMaxCharacter = 0x10ffff;

// The characters of valid UTF-8.
std::vector<uint32_t> characters(std::string_view utf8);

// A value; immutable once made. Every state of one that this header returns leads to a text.
struct Automaton {
  struct Arc {
    uint32_t low, high, target;  // any character of [low, high] leads to the state `target`
  };
  struct State {
    bool accepts = false;
    std::vector<Arc> arcs;  // ascending, apart from each other
  };
  std::vector<State> states;  // the first is where a text begins; none: no text at all

  bool empty() const { return states.empty(); }
  bool accepts(std::string_view utf8) const;

  static constexpr size_t kMaxStates = 8000;
};

// Drops the states from which no text can end.
void trim(Automaton& automaton);
// What both accept. nullopt: more than kMaxStates.
std::optional<Automaton> product(const Automaton& a, const Automaton& b);
// Texts of so many characters.
Automaton texts_of_length(int64_t least, std::optional<int64_t> most);
// All texts but these. nullopt: more than kMaxStates.
std::optional<Automaton> all_texts_but(const std::vector<std::string>& words);

}  // namespace pagedkv::server
