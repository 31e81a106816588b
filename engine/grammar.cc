#include "engine/grammar.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace pagedkv::engine {
namespace {

constexpr uint32_t kStart = 0xffffffffu;  // the left-hand side whose end is the answer's end
constexpr size_t kFewItems = 24;          // up to here a look at each is quicker than a hash

}  // namespace

// --- what a grammar says -----------------------------------------------------------------------------------------
// The rules with an alternative of which every element has a property: rules by themselves, characters by
// `characters`. The least such set, in time linear in the grammar.
std::vector<bool> Grammar::least_fixed_point(bool characters) const {
  struct Alternative {
    uint32_t rule;
    int64_t missing;  // rules of it that are not known to have the property
  };
  std::vector<Alternative> alternatives;
  std::vector<std::vector<uint32_t>> users(
      rules_.size());  // by rule: the alternatives that name it, once each time
  std::vector<bool> have(rules_.size());
  std::vector<uint32_t> found;
  const auto take = [&](uint32_t rule) {
    if (have[rule]) return;
    have[rule] = true;
    found.push_back(rule);
  };
  for (uint32_t rule = 0; rule < rules_.size(); ++rule) {
    for (uint32_t at : rules_[rule].alternatives) {
      bool possible = true;
      Alternative made{rule, 0};
      const auto index = uint32_t(alternatives.size());
      for (uint32_t i = at; elements_[i].kind != Kind::kEnd; ++i)
        possible &= characters || elements_[i].kind == Kind::kRule;
      if (!possible) continue;
      for (; elements_[at].kind != Kind::kEnd; ++at) {
        if (elements_[at].kind != Kind::kRule) continue;
        users[elements_[at].value].push_back(index);
        ++made.missing;
      }
      if (made.missing == 0) take(rule);
      alternatives.push_back(made);
    }
  }
  while (!found.empty()) {
    const uint32_t rule = found.back();
    found.pop_back();
    for (const uint32_t user : users[rule])
      if (--alternatives[user].missing == 0) take(alternatives[user].rule);
  }
  return have;
}

Status Grammar::finish() {
  const std::vector<bool> nullable = least_fixed_point(false);
  for (size_t r = 0; r < rules_.size(); ++r) rules_[r].nullable = nullable[r];
  if (!least_fixed_point(true)[root_])
    return invalid_argument("[grammar] \"root\" derives no text: its rules never end");
  return Status();
}

bool Grammar::fits(Element element, uint32_t low, uint32_t high) const {
  if (element.kind == Kind::kChar) return low <= element.value && element.value <= high;
  const Class& chars = classes_[element.value];
  const std::span<const Range> ranges(ranges_.data() + chars.begin, chars.end - chars.begin);
  if (!chars.negated)
    return std::any_of(ranges.begin(), ranges.end(), [&](Range r) { return r.low <= high && low <= r.high; });
  // A character outside: for one it is exact; of several, only a single range that holds them all leaves none.
  return std::none_of(ranges.begin(), ranges.end(), [&](Range r) { return r.low <= low && high <= r.high; });
}

// --- the vocabulary ----------------------------------------------------------------------------------------------
SortedPieces::SortedPieces(const std::vector<std::string>& pieces) {
  std::vector<int32_t> order;
  size_t bytes = 0;
  for (size_t token = 0; token < pieces.size(); ++token) {
    if (pieces[token].empty()) continue;
    order.push_back(int32_t(token));
    bytes += pieces[token].size();
  }
  const auto piece = [&](int32_t token) -> const std::string& { return pieces[size_t(token)]; };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::pair(std::string_view(piece(a)), a) < std::pair(std::string_view(piece(b)), b);
  });
  bytes_.reserve(bytes);
  std::string_view before;
  for (const int32_t token : order) {
    const std::string& text = piece(token);
    const auto common = std::mismatch(text.begin(), text.end(), before.begin(), before.end()).first - text.begin();
    entries_.push_back({token, uint32_t(bytes_.size()), uint32_t(text.size()), uint32_t(common)});
    bytes_ += text;
    before = text;
  }
}

// --- recognizing -------------------------------------------------------------------------------------------------
GrammarState::GrammarState(std::shared_ptr<const Grammar> grammar)
    : grammar_(std::move(grammar)), predicted_(grammar_->rules_.size()) {
  sets_.emplace_back();
  ++closing_;
  items_.clear();
  for (const uint32_t at : grammar_->rules_[grammar_->root_].alternatives) add({at, kStart, 0});
  if (grammar_->rules_[grammar_->root_].nullable) sets_.back().complete = true;
  close();
}

// Adds an item to the set that is being made, once.
void GrammarState::add(Item item) {
  const auto hash = [](const Item& i) {
    return (uint64_t{i.dot} * 0x9e3779b97f4a7c15u) ^ (uint64_t{i.lhs} * 0xc2b2ae3d27d4eb4fu) ^
           (uint64_t{i.origin} * 0x165667b19e3779f9u);
  };
  if (items_.size() < kFewItems) {
    if (std::find(items_.begin(), items_.end(), item) == items_.end()) items_.push_back(item);
    return;
  }
  const auto place = [&](const Item& i) {
    size_t slot = (hash(i) >> 20) & (slots_.size() - 1);
    while (slots_[slot] != 0 && items_[slots_[slot] - 1] != i) slot = (slot + 1) & (slots_.size() - 1);
    return slot;
  };
  if (items_.size() == kFewItems || items_.size() * 2 > slots_.size()) {
    slots_.assign(std::bit_ceil(std::max(8 * kFewItems, 4 * items_.size())), 0);
    for (size_t i = 0; i < items_.size(); ++i) slots_[place(items_[i])] = uint32_t(i + 1);
  }
  const size_t slot = place(item);
  if (slots_[slot] != 0) return;
  items_.push_back(item);
  slots_[slot] = uint32_t(items_.size());
}

// Follows each item of the new set to what it needs or completes. False: too much of it.
bool GrammarState::close() {
  const uint32_t here = uint32_t(sets_.size() - 1);
  const size_t begin = sets_.back().waiting_begin;
  for (size_t done = 0; done < items_.size();) {  // they grow meanwhile
    if (items_.size() + waiting_.size() > kMaxItems) {
      exhausted_ = true;
      return false;
    }
    const Item item = items_[done++];
    const Grammar::Element next = grammar_->elements_[item.dot];
    if (next.kind == Grammar::Kind::kEnd) {
      if (item.lhs == kStart) sets_.back().complete = true;
      if (item.lhs == kStart || item.origin == here) continue;  // what derives nothing was passed when predicted
      const size_t first = sets_[item.origin].waiting_begin, last = sets_[item.origin + 1].waiting_begin;
      const auto from =
          std::lower_bound(waiting_.begin() + std::ptrdiff_t(first), waiting_.begin() + std::ptrdiff_t(last),
                           item.lhs, [](const Waiting& w, uint32_t lhs) { return w.awaited < lhs; });
      for (size_t w = size_t(from - waiting_.begin()); w < last && waiting_[w].awaited == item.lhs; ++w)
        add(waiting_[w].item);
    } else if (next.kind == Grammar::Kind::kRule) {
      const Grammar::Rule& rule = grammar_->rules_[next.value];
      if (grammar_->elements_[item.dot + 1].kind == Grammar::Kind::kEnd) {
        // The last element: where it ends, the item ends, so its alternatives stand for the item's own. This keeps
        // right recursion flat.
        for (const uint32_t at : rule.alternatives) add({at, item.lhs, item.origin});
        continue;
      }
      waiting_.push_back({next.value, {item.dot + 1, item.lhs, item.origin}});
      if (rule.nullable) add({item.dot + 1, item.lhs, item.origin});
      if (std::exchange(predicted_[next.value], closing_) == closing_) continue;
      for (const uint32_t at : rule.alternatives) add({at, next.value, here});
    } else {
      terminals_.push_back(item);
    }
  }
  std::sort(waiting_.begin() + std::ptrdiff_t(begin), waiting_.end(),
            [](const Waiting& a, const Waiting& b) { return a.awaited < b.awaited; });
  return true;
}

bool GrammarState::step(uint32_t character) {
  if (exhausted_) return false;
  const size_t from = sets_.back().terminals_begin, to = terminals_.size();
  ++closing_;
  items_.clear();
  for (size_t i = from; i < to; ++i) {
    const Item item = terminals_[i];
    if (grammar_->fits(grammar_->elements_[item.dot], character, character))
      add({item.dot + 1, item.lhs, item.origin});
  }
  if (items_.empty()) return false;
  sets_.push_back({.waiting_begin = waiting_.size(), .terminals_begin = terminals_.size()});
  return close();
}

bool GrammarState::feed(char c) {
  const auto byte = static_cast<unsigned char>(c);
  if (utf8_.missing == 0) {
    if (byte < 0x80) return step(byte);
    // Neither overlong forms nor surrogates nor what lies past U+10FFFF.
    if (byte >= 0xc2 && byte <= 0xdf) {
      utf8_ = {byte & 0x1fu, 1};
    } else if (byte >= 0xe0 && byte <= 0xef) {
      utf8_ = {byte & 0x0fu, 2, uint8_t(byte == 0xe0 ? 0xa0 : 0x80), uint8_t(byte == 0xed ? 0x9f : 0xbf)};
    } else if (byte >= 0xf0 && byte <= 0xf4) {
      utf8_ = {byte & 0x07u, 3, uint8_t(byte == 0xf0 ? 0x90 : 0x80), uint8_t(byte == 0xf4 ? 0x8f : 0xbf)};
    } else {
      return false;
    }
    return can_become_a_character();
  }
  if (byte < utf8_.least || byte > utf8_.most) return false;
  const uint32_t bits = utf8_.bits << 6 | (byte & 0x3fu);
  const auto missing = uint8_t(utf8_.missing - 1);
  utf8_ = {.bits = bits, .missing = missing};
  return missing == 0 ? step(bits) : can_become_a_character();
}

// Is there a character that begins with these bytes and fits?
bool GrammarState::can_become_a_character() const {
  if (exhausted_) return false;
  const int later = 6 * (utf8_.missing - 1);
  const uint32_t low = (utf8_.bits << 6 | (utf8_.least & 0x3fu)) << later;
  const uint32_t high = (utf8_.bits << 6 | (utf8_.most & 0x3fu)) << later | ((1u << later) - 1);
  for (size_t i = sets_.back().terminals_begin; i < terminals_.size(); ++i)
    if (grammar_->fits(grammar_->elements_[terminals_[i].dot], low, high)) return true;
  return false;
}

void GrammarState::back_to(const Mark& mark) {
  if (sets_.size() > mark.sets) {
    waiting_.resize(sets_[mark.sets].waiting_begin);
    terminals_.resize(sets_[mark.sets].terminals_begin);
    sets_.resize(mark.sets);
  }
  utf8_ = mark.utf8;
}

// Only the last set's are looked at again.
void GrammarState::forget_terminals() {
  terminals_.erase(terminals_.begin(), terminals_.begin() + std::ptrdiff_t(sets_.back().terminals_begin));
  sets_.back().terminals_begin = 0;
}

bool GrammarState::fits(std::string_view piece) {
  const Mark before = mark();
  const bool all = std::all_of(piece.begin(), piece.end(), [this](char c) { return feed(c); });
  back_to(before);
  return all && !piece.empty();
}

bool GrammarState::advance(std::string_view piece) {
  const Mark before = mark();
  if (piece.empty() || !std::all_of(piece.begin(), piece.end(), [this](char c) { return feed(c); })) {
    back_to(before);
    return false;
  }
  forget_terminals();
  return true;
}

std::vector<int32_t> GrammarState::fitting(const SortedPieces& pieces) {
  std::vector<int32_t> tokens;
  std::vector<Mark> marks{mark()};  // [i]: after i bytes of the current piece
  bool stuck = false;               // the byte after marks.size() - 1 did not fit
  for (const SortedPieces::Entry& entry : pieces.entries_) {
    const size_t reached = marks.size() - 1;
    if (stuck && entry.common > reached) continue;  // begins with the byte that did not fit
    stuck = false;
    marks.resize(std::min<size_t>(entry.common, reached) + 1);
    back_to(marks.back());
    while (marks.size() <= entry.size) {
      if (!feed(pieces.bytes_[entry.begin + marks.size() - 1])) {
        back_to(marks.back());
        stuck = true;
        break;
      }
      marks.push_back(mark());
    }
    if (!stuck) tokens.push_back(entry.token);
  }
  back_to(marks.front());
  return tokens;
}

}  // namespace pagedkv::engine
