#include "server/automaton.h"

#include <algorithm>
#include <map>
#include <utility>

namespace pagedkv::server {

std::vector<uint32_t> characters(std::string_view utf8) {
  std::vector<uint32_t> out;
  for (size_t at = 0; at < utf8.size();) {
    const auto byte = static_cast<unsigned char>(utf8[at]);
    const size_t size = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    uint32_t c = size == 1 ? byte : byte & (0x3fu >> (size - 1));
    for (size_t i = 1; i < size && at + i < utf8.size(); ++i)
      c = c << 6 | (static_cast<unsigned char>(utf8[at + i]) & 0x3fu);
    out.push_back(c);
    at += size;
  }
  return out;
}

bool Automaton::accepts(std::string_view utf8) const {
  if (states.empty()) return false;
  uint32_t state = 0;
  for (const uint32_t c : characters(utf8)) {
    const auto& arcs = states[state].arcs;
    const auto arc = std::find_if(arcs.begin(), arcs.end(), [&](const Arc& a) { return c <= a.high; });
    if (arc == arcs.end() || c < arc->low) return false;
    state = arc->target;
  }
  return states[state].accepts;
}

void trim(Automaton& automaton) {
  auto& states = automaton.states;
  std::vector<std::vector<uint32_t>> before(states.size());
  std::vector<uint32_t> live;
  std::vector<bool> ends(states.size());
  for (uint32_t s = 0; s < states.size(); ++s) {
    for (const Automaton::Arc& arc : states[s].arcs) before[arc.target].push_back(s);
    if (states[s].accepts) live.push_back(s);
    ends[s] = states[s].accepts;
  }
  for (size_t i = 0; i < live.size(); ++i) {  // it grows meanwhile
    for (const uint32_t s : before[live[i]]) {
      if (ends[s]) continue;
      ends[s] = true;
      live.push_back(s);
    }
  }
  if (states.empty() || !ends[0]) return states.clear();
  std::vector<uint32_t> moved(states.size());
  uint32_t kept = 0;
  for (uint32_t s = 0; s < states.size(); ++s) {
    if (ends[s]) moved[s] = kept++;
  }
  for (uint32_t s = 0; s < states.size(); ++s) {
    if (!ends[s]) continue;
    std::erase_if(states[s].arcs, [&](const Automaton::Arc& arc) { return !ends[arc.target]; });
    for (Automaton::Arc& arc : states[s].arcs) arc.target = moved[arc.target];
    if (moved[s] != s) states[moved[s]] = std::move(states[s]);
  }
  states.resize(kept);
}

std::optional<Automaton> product(const Automaton& a, const Automaton& b) {
  Automaton out;
  if (a.empty() || b.empty()) return out;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> known;
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  const auto state_of = [&](uint32_t in_a, uint32_t in_b) {
    const auto [at, added] = known.try_emplace({in_a, in_b}, uint32_t(pairs.size()));
    if (added) {
      pairs.emplace_back(in_a, in_b);
      out.states.push_back({.accepts = a.states[in_a].accepts && b.states[in_b].accepts});
    }
    return at->second;
  };
  state_of(0, 0);
  for (size_t done = 0; done < pairs.size(); ++done) {
    if (pairs.size() > Automaton::kMaxStates) return std::nullopt;
    const auto& of_a = a.states[pairs[done].first].arcs;
    const auto& of_b = b.states[pairs[done].second].arcs;
    for (size_t i = 0, j = 0; i < of_a.size() && j < of_b.size();) {
      const uint32_t low = std::max(of_a[i].low, of_b[j].low), high = std::min(of_a[i].high, of_b[j].high);
      if (low <= high) {
        const uint32_t target = state_of(of_a[i].target, of_b[j].target);
        out.states[done].arcs.push_back({low, high, target});
      }
      const bool a_ends = of_a[i].high <= of_b[j].high;
      (a_ends ? i : j) += 1;
    }
  }
  trim(out);
  return out;
}

Automaton texts_of_length(int64_t least, std::optional<int64_t> most) {
  Automaton out;
  if (most && *most < least) return out;
  const int64_t last = most.value_or(least);
  for (int64_t n = 0; n <= last; ++n) {
    out.states.push_back({.accepts = n >= least});
    if (n < last || !most) out.states.back().arcs.push_back({0, kMaxCharacter, uint32_t(std::min(n + 1, last))});
  }
  return out;
}

std::optional<Automaton> all_texts_but(const std::vector<std::string>& words) {
  // The trie of the words; what leaves it goes to the state 1, which accepts all that follows.
  std::vector<std::map<uint32_t, uint32_t>> next(2);
  std::vector<bool> is_word(2);
  for (const std::string& word : words) {
    uint32_t at = 0;
    for (const uint32_t c : characters(word)) {
      const auto [found, added] = next[at].try_emplace(c, uint32_t(next.size()));
      at = found->second;
      if (!added) continue;
      if (next.size() >= Automaton::kMaxStates) return std::nullopt;
      next.emplace_back();
      is_word.push_back(false);
    }
    is_word[at] = true;
  }
  Automaton out;
  for (size_t s = 0; s < next.size(); ++s) {
    Automaton::State state{.accepts = !is_word[s]};
    uint32_t from = 0;
    for (const auto& [c, target] : next[s]) {
      if (from < c) state.arcs.push_back({from, c - 1, 1});
      state.arcs.push_back({c, c, target});
      from = c + 1;
    }
    if (from <= kMaxCharacter) state.arcs.push_back({from, kMaxCharacter, 1});
    out.states.push_back(std::move(state));
  }
  return out;
}

}  // namespace pagedkv::server
