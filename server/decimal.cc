#include "server/decimal.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace pagedkv::server {
namespace {

constexpr int kMaxExponent = 400;
constexpr size_t kMaxDigits = 15;  // DBL_DIG

int sign(int value) { return (value > 0) - (value < 0); }

int compare_magnitudes(const Decimal& a, const Decimal& b) {
  if (a.whole.size() != b.whole.size()) return a.whole.size() < b.whole.size() ? -1 : 1;
  if (const int whole = a.whole.compare(b.whole)) return sign(whole);
  return sign(a.fraction.compare(b.fraction));  // no zeros at their ends
}

// A number's text, read up to here.
struct Reading {
  enum class At { kStart, kMinus, kZero, kWhole, kPoint, kFraction } at = At::kStart;
  bool negative = false, nonzero = false;
  int n_whole = 0;     // digits before the point; behind it 0
  int n_fraction = 0;  // digits behind it
  int room = 0;        // for more of those
  // The digits so far beside as many of a bound's; from the point on, beside the bound.
  int to_low = 0, to_high = 0;
  uint64_t rest = 0;  // of the digits so far, divided by the multiple's units

  auto tied() const { return std::tie(at, negative, nonzero, n_whole, n_fraction, room, to_low, to_high, rest); }
  bool operator<(const Reading& other) const { return tied() < other.tied(); }
};

// Follows numbers' texts for limits with one multiple at most.
class NumberReader {
 public:
  NumberReader(const NumberLimits& limits, const Decimal* multiple) : limits_(limits) {
    if (!multiple) return;
    units_ = units(*multiple).value_or(1);
    if (units_ > kMaxMultiple) n_zeros_ = multiple->whole.size() - 1;
    scale_ = int(multiple->fraction.size());
  }

  std::optional<Reading> next(Reading r, char c) const {
    using At = Reading::At;
    const bool fraction = r.at == At::kPoint || r.at == At::kFraction;
    if (c == '-') {
      if (r.at != At::kStart) return std::nullopt;
      r.at = At::kMinus;
      r.negative = true;
      return r;
    }
    if (c == '.') {
      if ((r.at != At::kZero && r.at != At::kWhole) || limits_.whole) return std::nullopt;
      r.to_low = beside(limits_.low, r, r.to_low);
      r.to_high = beside(limits_.high, r, r.to_high);
      r.room = int(kMaxDigits) - r.n_whole;
      if (scale_ >= 0) r.room = std::min(r.room, scale_);
      r.n_whole = 0;
      r.at = At::kPoint;
      if (r.room == 0) return std::nullopt;
      return r;
    }
    if (r.at == At::kZero || (fraction && r.room == 0) || r.n_whole == int(kMaxDigits)) return std::nullopt;
    r.nonzero |= c != '0';
    if (n_zeros_ > 0) {
      r.rest = c == '0' ? r.rest - std::min<uint64_t>(r.rest, 1) : n_zeros_;
    } else {
      r.rest = (r.rest * 10 + uint64_t(c - '0')) % units_;
    }
    const auto digit_of = [&](const std::optional<NumberLimits::Bound>& bound) {
      const std::string& digits = fraction ? bound->value.fraction : bound->value.whole;
      const auto index = size_t(fraction ? r.n_fraction : r.n_whole);
      return index < digits.size() ? digits[index] : '0';
    };
    if (limits_.low && r.to_low == 0) r.to_low = sign(c - digit_of(limits_.low));
    if (limits_.high && r.to_high == 0) r.to_high = sign(c - digit_of(limits_.high));
    if (fraction) {
      r.at = At::kFraction;
      ++r.n_fraction;
      --r.room;
    } else {
      r.at = r.n_whole == 0 && c == '0' ? At::kZero : At::kWhole;
      ++r.n_whole;
    }
    return r;
  }

  bool ends(const Reading& r) const {
    using At = Reading::At;
    const bool fraction = r.at == At::kFraction;
    if (!fraction && r.at != At::kZero && r.at != At::kWhole) return false;
    if (r.negative && !r.nonzero) return false;
    uint64_t rest = r.rest;
    for (int i = r.n_fraction; i < scale_; ++i) rest = rest * 10 % units_;
    if (rest != 0) return false;
    return within(limits_.low, r, r.to_low, false) && within(limits_.high, r, r.to_high, true);
  }

 private:
  // The whole part beside the bound's.
  static int beside(const std::optional<NumberLimits::Bound>& bound, const Reading& r, int digits) {
    if (!bound) return 0;
    const int size = int(bound->value.whole.size());
    return r.n_whole == size ? digits : sign(r.n_whole - size);
  }
  static bool within(const std::optional<NumberLimits::Bound>& bound, const Reading& r, int digits, bool upper) {
    if (!bound) return true;
    if (r.negative != bound->value.negative) return r.negative == upper;
    int magnitude = r.at == Reading::At::kFraction ? digits : beside(bound, r, digits);
    if (magnitude == 0 && bound->value.fraction.size() > size_t(r.n_fraction)) magnitude = -1;
    const int value = r.negative ? -magnitude : magnitude;
    return (upper ? value < 0 : value > 0) || (value == 0 && !bound->exclusive);
  }

  const NumberLimits& limits_;
  uint64_t units_ = 1;
  uint64_t n_zeros_ = 0;  // at the end of each multiple of a large power of ten; Reading::rest counts those missing
  int scale_ = -1;        // digits of the multiple's fraction; -1: no multiple
};

std::optional<Automaton> texts_of(const NumberLimits& limits, const Decimal* multiple) {
  const NumberReader reader(limits, multiple);
  Automaton out;
  std::map<Reading, uint32_t> known;
  std::vector<Reading> readings;
  const auto state_of = [&](const Reading& reading) {
    const auto [at, added] = known.try_emplace(reading, uint32_t(readings.size()));
    if (added) {
      readings.push_back(reading);
      out.states.push_back({.accepts = reader.ends(reading)});
    }
    return at->second;
  };
  state_of({});
  for (size_t done = 0; done < readings.size(); ++done) {
    if (readings.size() > Automaton::kMaxStates) return std::nullopt;
    for (const char c : std::string_view("-.0123456789")) {
      const auto next = reader.next(readings[done], c);
      if (!next) continue;
      const uint32_t target = state_of(*next);
      const uint32_t character = static_cast<unsigned char>(c);
      auto& arcs = out.states[done].arcs;
      if (!arcs.empty() && arcs.back().target == target && arcs.back().high + 1 == character) {
        arcs.back().high = character;
      } else {
        arcs.push_back({character, character, target});
      }
    }
  }
  trim(out);
  return out;
}

}  // namespace

int compare(const Decimal& a, const Decimal& b) {
  if (a.negative != b.negative) return a.negative ? -1 : 1;
  return a.negative ? -compare_magnitudes(a, b) : compare_magnitudes(a, b);
}

std::optional<Decimal> decimal(const OrderedJson& number) {
  if (!number.is_number()) return std::nullopt;
  const std::string text = number.dump();
  std::string digits;
  int64_t exponent = 0;
  size_t at = text.starts_with('-') ? 1 : 0;
  bool fraction = false;
  for (; at < text.size() && text[at] != 'e' && text[at] != 'E'; ++at) {
    if (text[at] == '.') {
      fraction = true;
      continue;
    }
    digits += text[at];
    if (fraction) --exponent;
  }
  if (at < text.size()) exponent += std::stoi(text.substr(at + 1));
  if (exponent < -kMaxExponent || exponent > kMaxExponent) return std::nullopt;
  if (exponent > 0) digits.append(size_t(exponent), '0');
  const auto n_fraction = size_t(std::max<int64_t>(0, -exponent));
  if (digits.size() <= n_fraction) digits.insert(0, n_fraction + 1 - digits.size(), '0');
  Decimal out{.whole = digits.substr(0, digits.size() - n_fraction),
              .fraction = digits.substr(digits.size() - n_fraction)};
  out.whole.erase(0, std::min(out.whole.find_first_not_of('0'), out.whole.size() - 1));
  out.fraction.erase(out.fraction.find_last_not_of('0') + 1);
  out.negative = text.starts_with('-') && (out.whole != "0" || !out.fraction.empty());
  return out;
}

void NumberLimits::at_least(Bound bound) {
  const int order = low ? compare(bound.value, low->value) : 1;
  if (order > 0 || (order == 0 && bound.exclusive)) low = std::move(bound);
}

void NumberLimits::at_most(Bound bound) {
  const int order = high ? compare(bound.value, high->value) : -1;
  if (order < 0 || (order == 0 && bound.exclusive)) high = std::move(bound);
}

std::optional<uint64_t> units(const Decimal& multiple) {
  const std::string digits = multiple.whole + multiple.fraction;
  const size_t first = std::min(digits.find_first_not_of('0'), digits.size());
  if (multiple.negative || first == digits.size() || digits.size() - first > kMaxDigits) return std::nullopt;
  const uint64_t value = std::stoull(digits.substr(first));
  const bool power_of_ten =
      multiple.fraction.empty() && digits.find_first_not_of('0', first + 1) == std::string::npos;
  if (value > kMaxMultiple && !(power_of_ten && digits[first] == '1')) return std::nullopt;
  return value;
}

bool NumberLimits::allow(const Decimal& value) const {
  if (whole && !value.fraction.empty()) return false;
  if (low && compare(value, low->value) < (low->exclusive ? 1 : 0)) return false;
  if (high && compare(value, high->value) > (high->exclusive ? -1 : 0)) return false;
  return std::all_of(multiples.begin(), multiples.end(), [&](const Decimal& multiple) {
    if (value.fraction.size() > multiple.fraction.size()) return false;
    std::string digits = value.whole + value.fraction;
    digits.append(multiple.fraction.size() - value.fraction.size(), '0');
    uint64_t rest = 0;
    const uint64_t by = units(multiple).value_or(1);
    for (const char c : digits) rest = (rest * 10 + uint64_t(c - '0')) % by;
    return rest == 0;
  });
}

std::optional<Automaton> texts_of_numbers(const NumberLimits& limits) {
  std::optional<Automaton> all = texts_of(limits, limits.multiples.empty() ? nullptr : &limits.multiples[0]);
  for (size_t i = 1; all && i < limits.multiples.size(); ++i) {
    const auto more = texts_of(limits, &limits.multiples[i]);
    all = more ? product(*all, *more) : std::nullopt;
  }
  return all;
}

}  // namespace pagedkv::server
