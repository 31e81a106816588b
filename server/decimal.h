// Numbers of a schema, exact as they are written, and the texts of numbers between two of them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/automaton.h"
#include "server/json_body.h"

namespace pagedkv::server {

struct Decimal {
  bool negative = false;
  std::string whole = "0", fraction;  // digits, without zeros that say nothing; zero is not negative
};

// Below 0, 0 or above, as a is to b.
int compare(const Decimal& a, const Decimal& b);
// nullopt: `number` is none, or has more digits than a double needs.
std::optional<Decimal> decimal(const OrderedJson& number);

struct NumberLimits {
  struct Bound {
    Decimal value;
    bool exclusive = false;
  };
  bool whole = false;
  std::optional<Bound> low, high;
  std::vector<Decimal> multiples;

  bool plain() const { return !low && !high && multiples.empty(); }
  void at_least(Bound bound);
  void at_most(Bound bound);
  bool allow(const Decimal& value) const;
};

// A multipleOf in units of its last digit. nullopt: not above 0, or above kMaxMultiple and no power of ten, which
// takes too many states.
inline constexpr uint64_t kMaxMultiple = 500;
std::optional<uint64_t> units(const Decimal& multiple);

// The numbers that limits allow, written without an exponent, with up to 15 digits: a double tells any two of them
// apart, so a reader sees the number that was written. nullopt: more than Automaton::kMaxStates.
std::optional<Automaton> texts_of_numbers(const NumberLimits& limits);

}  // namespace pagedkv::server
