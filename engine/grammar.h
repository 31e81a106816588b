// Grammars in GBNF, and the recognizer that follows one answer through one.
//
// Earley's algorithm over Unicode characters: any context-free grammar, ambiguous or left-recursive, in polynomial
// time and bounded memory. Nothing here aborts, prints or recurses deeper than kMaxDepth. Why not libllama's:
// decision 0013.
//   Source: J. Earley, "An efficient context-free parsing algorithm", CACM 13(2), 1970; the treatment of rules that
//   derive nothing is that of J. Aycock and R. N. Horspool, "Practical Earley parsing", The Computer Journal 45(6),
//   2002.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/status.h"

namespace pagedkv::engine {

// Immutable; any thread.
class Grammar {
 public:
  // Reads GBNF with a rule "root". Errors: kInvalidArgument with the line and what is wrong there: syntax, a rule
  // that is missing, a root that derives no text at all, more than kMaxBytes, kMaxDepth or kMaxElements.
  static Result<std::shared_ptr<const Grammar>> parse(std::string_view gbnf);

  static constexpr size_t kMaxBytes = size_t{16} << 20;
  static constexpr int kMaxDepth = 500;             // of parentheses in each other
  static constexpr size_t kMaxElements = 1 << 20;   // characters, classes and references, repetitions written out
  static constexpr int64_t kMaxRepetitions = 4096;  // m and n of {m,n}

 private:
  friend class GrammarParser;
  friend class GrammarState;

  // A rule's alternatives lie one after the other, each closed by kEnd.
  enum class Kind : uint8_t { kEnd, kChar, kClass, kRule };
  struct Element {
    Kind kind = Kind::kEnd;
    uint32_t value = 0;  // kChar: the character; kClass: index of classes_; kRule: index of rules_
  };
  struct Range {
    uint32_t low, high;
  };
  struct Class {
    bool negated = false;
    uint32_t begin = 0, end = 0;  // of ranges_
  };
  struct Rule {
    std::vector<uint32_t> alternatives;  // where each begins in elements_
    bool nullable = false;               // it derives the empty text
  };

  Grammar() = default;
  std::vector<bool> least_fixed_point(bool characters) const;
  Status finish();
  // Does a character of [low, high] fit this element?
  bool fits(Element element, uint32_t low, uint32_t high) const;

  std::vector<Element> elements_;
  std::vector<Range> ranges_;
  std::vector<Class> classes_;
  std::vector<Rule> rules_;
  uint32_t root_ = 0;
};

// The pieces of a vocabulary in the order of their bytes, so that tokens that begin alike are looked at once.
class SortedPieces {
 public:
  // Tokens with an empty piece are left out: no grammar derives them.
  explicit SortedPieces(const std::vector<std::string>& pieces);

 private:
  friend class GrammarState;
  struct Entry {
    int32_t token;
    uint32_t begin, size;  // in bytes_
    uint32_t common;       // leading bytes shared with the entry before
  };
  std::string bytes_;
  std::vector<Entry> entries_;
};

// Where an answer stands in its grammar. One thread.
class GrammarState {
 public:
  explicit GrammarState(std::shared_ptr<const Grammar> grammar);

  // The text so far is one that the grammar derives.
  bool complete() const { return sets_.back().complete && utf8_.missing == 0; }
  // Can the answer go on with these bytes? They may end inside a character.
  bool fits(std::string_view piece);
  // Goes on with them. False: they do not fit, and nothing has changed.
  bool advance(std::string_view piece);
  // Every token whose piece fits, in the order of the pieces' bytes.
  std::vector<int32_t> fitting(const SortedPieces& pieces);
  // The answer is so long and ambiguous that its state passed kMaxItems: nothing fits any more.
  bool exhausted() const { return exhausted_; }

  static constexpr size_t kMaxItems = 1 << 20;  // 16 MB a state

 private:
  // The alternative of `lhs` that began at character `origin` has been recognized up to `dot`.
  struct Item {
    uint32_t dot, lhs, origin;
    bool operator==(const Item&) const = default;
  };
  // An item that goes on at `item` once `awaited` is recognized.
  struct Waiting {
    uint32_t awaited;
    Item item;
  };
  // What is known after one more character. `waiting` and `terminals` are runs of the vectors below.
  struct Set {
    size_t waiting_begin = 0, terminals_begin = 0;
    bool complete = false;
  };
  // A character of which bytes are missing: its bits so far, and what the next byte may be.
  struct Utf8 {
    uint32_t bits = 0;
    uint8_t missing = 0;
    uint8_t least = 0x80, most = 0xbf;
  };
  struct Mark {
    size_t sets;
    Utf8 utf8;
  };

  bool feed(char byte);
  bool step(uint32_t character);
  bool can_become_a_character() const;
  void add(Item item);
  bool close();
  bool expand(Item item);
  Mark mark() const { return {sets_.size(), utf8_}; }
  void back_to(const Mark& mark);
  void forget_terminals();

  const std::shared_ptr<const Grammar> grammar_;
  std::vector<Set> sets_;         // one for each character, and one before the first
  std::vector<Waiting> waiting_;  // of all sets
  std::vector<Item> terminals_;   // of the last sets: items whose next element is a character
  Utf8 utf8_;
  bool exhausted_ = false;

  // Scratch of close(): the items of the set that is being made.
  std::vector<Item> items_;
  std::vector<uint32_t> slots_;      // hash table of indices into items_, used once there are many
  std::vector<uint64_t> predicted_;  // by rule: the last close() that predicted it
  uint64_t closing_ = 0;
};

}  // namespace pagedkv::engine
