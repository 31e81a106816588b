// What schemas' grammars are made of: automata, patterns, numbers.
#include <gtest/gtest.h>

#include "server/automaton.h"
#include "server/decimal.h"
#include "server/pattern.h"

namespace pagedkv::server {
namespace {

bool found(const char* pattern, const char* text) { return pattern_automaton(pattern).value().accepts(text); }

TEST(Pattern, IsFoundAnywhereUnlessItIsAnchored) {
  EXPECT_TRUE(found("b", "abc"));
  EXPECT_FALSE(found("^b", "abc"));
  EXPECT_TRUE(found("c$", "abc"));
  EXPECT_TRUE(found("^a|c$", "ax"));
  EXPECT_TRUE(found("^a|c$", "xc"));
  EXPECT_FALSE(found("^a|c$", "xax"));
  EXPECT_FALSE(found("^(a|c)$", "ac"));
  EXPECT_TRUE(found("(^|,)q(,|$)", "x,q"));
  EXPECT_FALSE(found("(^|,)q(,|$)", "xq"));
  EXPECT_TRUE(found("", ""));
  EXPECT_TRUE(found("^$", ""));
  EXPECT_FALSE(found("^$", "a"));
  EXPECT_FALSE(found("a^", "a"));
}

TEST(Pattern, ReadsClassesGroupsAndBounds) {
  EXPECT_TRUE(found("^[a-c\\d_-]+$", "a9_-"));
  EXPECT_FALSE(found("^[^a-c]+$", "xa"));
  EXPECT_TRUE(found("^.$", "\u4e2d"));
  EXPECT_FALSE(found("^.$", "\n"));
  EXPECT_TRUE(found("^(?:ab){2,3}?$", "ababab"));
  EXPECT_FALSE(found("^(?<n>ab){2,3}$", "ab"));
  EXPECT_TRUE(found("^\\u00e9\\x41\\.$", "\u00e9A."));
  EXPECT_TRUE(found("^(a*)*b$", "aaab"));
  EXPECT_FALSE(found("^(x+x+)+y$", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"));
}

TEST(Pattern, WhatNoAutomatonFollowsIsAnError) {
  for (const char* pattern : {"(a)\\1",
                              "a(?=b)",
                              "a(?!b)",
                              "(?<=a)b",
                              "\\bw",
                              "\\p{L}",
                              "(",
                              ")",
                              "[",
                              "[b-a]",
                              "*",
                              "a{2,1}",
                              "a{1001}",
                              "a{,2}",
                              "^*",
                              "\\",
                              "\\ud800",
                              "(?i)a",
                              "(a{1000}){1000}",
                              "[ab]*a[ab]{30}$"})
    EXPECT_EQ(pattern_automaton(pattern).status().code(), Code::kInvalidArgument) << pattern;
}

TEST(Formats, DatesAreThoseOfTheCalendar) {
  const auto date = pattern_automaton(*format_pattern("date")).value();
  for (const char* good : {"2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01", "2023-04-30"})
    EXPECT_TRUE(date.accepts(good)) << good;
  for (const char* bad :
       {"2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "0000-01-01", "2023-1-1", "2024-02-30"})
    EXPECT_FALSE(date.accepts(bad)) << bad;
}

TEST(Automata, AProductAcceptsWhatBothDo) {
  const auto both = product(pattern_automaton("a").value(), pattern_automaton("b").value());
  ASSERT_TRUE(both.has_value());
  EXPECT_TRUE(both->accepts("xbya"));
  EXPECT_FALSE(both->accepts("xbyb"));
  EXPECT_TRUE(product(pattern_automaton("^a*$").value(), pattern_automaton("b").value())->empty());
  EXPECT_TRUE(product(pattern_automaton("a").value(), texts_of_length(0, 0))->empty());
}

TEST(Automata, AllTextsButSomeAreThose) {
  const auto others = all_texts_but({"a", "abc", ""});
  ASSERT_TRUE(others.has_value());
  for (const char* text : {"a", "abc", ""}) EXPECT_FALSE(others->accepts(text)) << text;
  for (const char* text : {"ab", "abcd", "b", "\u00e9"}) EXPECT_TRUE(others->accepts(text)) << text;
}

Decimal number(const char* text) { return decimal(OrderedJson::parse(text)).value(); }

TEST(Numbers, BetweenTwoBoundsAreAllWrittenAndNoOthers) {
  NumberLimits limits{.whole = true, .low = {{number("-37")}}, .high = {{number("1205"), true}}};
  const auto texts = texts_of_numbers(limits).value();
  for (int i = -2000; i < 20000; ++i) EXPECT_EQ(texts.accepts(std::to_string(i)), -37 <= i && i < 1205) << i;
  EXPECT_FALSE(texts.accepts("007"));
  EXPECT_FALSE(texts.accepts("-0"));
}

TEST(Numbers, MultiplesAndFractionsAreExact) {
  NumberLimits limits{.low = {{number("-2.5"), true}}, .high = {{number("1e1")}}, .multiples = {number("0.25")}};
  const auto texts = texts_of_numbers(limits).value();
  for (const char* good : {"-2.25", "0", "0.5", "0.50", "9.75", "10", "10.00", "-0.25"})
    EXPECT_TRUE(texts.accepts(good)) << good;
  for (const char* bad : {"-2.5", "-2.50", "0.1", "10.25", "0.125", "1e0", "1.", ".5", "-0.0", "+1"})
    EXPECT_FALSE(texts.accepts(bad)) << bad;
  const auto thousands = texts_of_numbers({.multiples = {number("1000")}}).value();
  EXPECT_TRUE(thousands.accepts("-21000"));
  EXPECT_TRUE(thousands.accepts("0"));
  EXPECT_FALSE(thousands.accepts("1100"));
}

TEST(Numbers, AreReadAsTheyAreWritten) {
  EXPECT_EQ(compare(number("1e-7"), number("0.0000001")), 0);
  EXPECT_EQ(compare(number("-0.0"), number("0")), 0);
  EXPECT_LT(compare(number("-10"), number("-9.5")), 0);
  EXPECT_GT(compare(number("18446744073709551615"), number("9223372036854775807")), 0);
  EXPECT_FALSE(decimal(OrderedJson("1")).has_value());
}

}  // namespace
}  // namespace pagedkv::server
