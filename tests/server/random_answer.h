// An answer that a grammar derives, drawn one character after the other.
#pragma once

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/grammar.h"

namespace pagedkv::server {

inline const std::vector<std::string>& answer_characters() {
  static const auto kCharacters = [] {
    std::vector<std::string> all = {"\n", "\u00e9", "\u4e2d", "\U0001f600"};
    for (char c = ' '; c < '\x7f'; ++c) all.emplace_back(1, c);
    return all;
  }();
  return kCharacters;
}

// After `soft` characters it takes what closes something where it can; nullopt: after `hard` there was no end.
inline std::optional<std::string> random_answer(const std::shared_ptr<const engine::Grammar>& grammar,
                                                std::mt19937& random, size_t soft, size_t hard) {
  static const engine::SortedPieces kPieces(answer_characters());
  engine::GrammarState state(grammar);
  std::string answer;
  while (answer.size() < hard) {
    const std::vector<int32_t> fitting = state.fitting(kPieces);
    if (state.complete() && (fitting.empty() || answer.size() >= soft || random() % 4 == 0)) return answer;
    if (fitting.empty()) return std::nullopt;
    auto take = size_t(fitting[random() % fitting.size()]);
    const bool close = random() % 8 < (answer.size() >= soft ? 6 : 1);
    for (const int32_t token : fitting) {
      const std::string& piece = answer_characters()[size_t(token)];
      if (close && (piece == "\"" || piece == "}" || piece == "]")) take = size_t(token);
    }
    const std::string& piece = answer_characters()[take];
    if (!state.advance(piece)) return std::nullopt;
    answer += piece;
  }
  return std::nullopt;
}

}  // namespace pagedkv::server
