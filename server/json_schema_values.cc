// Which values a schema allows, and which two forms share none.
#include <algorithm>
#include <utility>

#include "server/json_schema.h"

namespace pagedkv::server {
namespace {

constexpr int kMaxApartDepth = 4;  // of objects looked into for a member that tells them apart

Types type_of(const OrderedJson& value) {
  switch (value.type()) {
    case OrderedJson::value_t::null:
      return kNullType;
    case OrderedJson::value_t::boolean:
      return kBooleanType;
    case OrderedJson::value_t::object:
      return kObjectType;
    case OrderedJson::value_t::array:
      return kArrayType;
    case OrderedJson::value_t::string:
      return kStringType;
    default:
      break;
  }
  const auto number = decimal(value);
  return number && number->fraction.empty() ? kWholeType : kFractionType;
}

}  // namespace

bool Schema::allows(const Conjunction& all, const OrderedJson& value, bool formats) {
  if (all.empty()) return true;
  const std::vector<Form> ways = forms(all, Reading::kAllowed);
  return std::any_of(ways.begin(), ways.end(), [&](const Form& form) { return allows(form, value, formats); });
}

bool Schema::allows(const Form& form, const OrderedJson& value, bool formats) {
  if (!spend(1 + form.all.size() + (form.values ? form.values->size() : 0))) return false;
  const Types type = type_of(value);
  if ((form.types & type) == 0) return false;
  if (form.values) {
    const Json plain(value);  // objects are equal in any order
    const auto same = [&](const OrderedJson* one) { return one->type() == value.type() || one->is_number(); };
    if (std::none_of(form.values->begin(), form.values->end(),
                     [&](const OrderedJson* one) { return same(one) && Json(*one) == plain; }))
      return false;
  }
  if (std::any_of(form.none_of.begin(), form.none_of.end(),
                  [&](const Place& other) { return allows(Conjunction{other}, value, formats); }))
    return false;
  if (type == kStringType) return allows_string(form, value.get_ref<const std::string&>(), formats);
  if ((type & kNumberType) != 0) {
    const auto number = decimal(value);
    return number && numbers(form).allow(*number);
  }
  if (type == kArrayType) return allows_array(form, value, formats);
  return type != kObjectType || allows_object(form, value, formats);
}

bool Schema::allows_string(const Form& form, const std::string& value, bool formats) {
  const StringLimits limits = strings(form.all);
  if (!spend(value.size())) return false;
  const auto size = int64_t(characters(value).size());
  if (size < limits.least || (limits.most && size > *limits.most)) return false;
  const auto fits = [&](const Automaton* automaton) { return automaton->accepts(value); };
  return std::all_of(limits.patterns.begin(), limits.patterns.end(), fits) &&
         (!formats || std::all_of(limits.formats.begin(), limits.formats.end(), fits));
}

bool Schema::allows_array(const Form& form, const OrderedJson& value, bool formats) {
  const ArrayLimits limits = arrays(form.all);
  const auto size = int64_t(value.size());
  if (size < limits.least.value_or(0) || (limits.most && size > *limits.most)) return false;
  for (size_t i = 0; i < value.size(); ++i)
    if (!allows(i < limits.prefix.size() ? limits.prefix[i] : limits.rest, value[i], formats)) return false;
  return true;
}

bool Schema::allows_object(const Form& form, const OrderedJson& value, bool formats) {
  const ObjectLimits limits = objects(form.all);
  std::unordered_map<std::string_view, const OrderedJson*> members;
  for (const auto& [name, member] : value.items()) members.emplace(name, &member);
  for (const ObjectLimits::Property& property : limits.properties) {
    const auto member = members.find(property.name);
    if (member == members.end() ? property.required : !allows(property.value, *member->second, formats))
      return false;
    members.erase(property.name);
  }
  if (limits.closed) return members.empty();
  return std::all_of(members.begin(), members.end(),
                     [&](const auto& member) { return allows(limits.others, *member.second, formats); });
}

// --- forms without a common value
// -----------------------------------------------------------------------------------
bool Schema::apart(const Form& written, const Form& allowed, int depth) {
  if (!spend(10) || depth > kMaxApartDepth) return false;
  Types both = written.types & allowed.types;
  if (both == 0) return true;
  const auto out_of = [&](const Form& form) {
    return [this, &form](const OrderedJson* value) { return !allows(form, *value, false); };
  };
  if (written.values) return std::all_of(written.values->begin(), written.values->end(), out_of(allowed));
  if (allowed.values) return std::all_of(allowed.values->begin(), allowed.values->end(), out_of(written));
  if ((both & (kNullType | kBooleanType)) != 0) return false;
  if ((both & kStringType) != 0 && !strings_apart(written, allowed)) return false;
  if ((both & kNumberType) != 0 && !numbers_apart(written, allowed)) return false;
  if ((both & kObjectType) != 0 && !objects_apart(written, allowed, depth)) return false;
  if ((both & kArrayType) == 0) return true;
  const ArrayLimits a = arrays(written.all), b = arrays(allowed.all);
  return (a.most && *a.most < b.least.value_or(0)) || (b.most && *b.most < a.least.value_or(0));
}

// nullopt: any string, or more states than we follow.
std::optional<Automaton> Schema::strings_of(const Form& form, bool formats) {
  StringLimits limits = strings(form.all);
  if (error_) return std::nullopt;
  if (formats) limits.patterns.insert(limits.patterns.end(), limits.formats.begin(), limits.formats.end());
  std::optional<Automaton> out = texts_of_length(limits.least, limits.most);
  for (const Automaton* pattern : limits.patterns) {
    out = product(*out, *pattern);
    if (!out || !spend(100 * out->states.size())) return std::nullopt;
  }
  return out;
}

bool Schema::strings_apart(const Form& written, const Form& allowed) {
  const auto a = strings_of(written, true), b = strings_of(allowed, false);
  if (!a || !b) return false;
  const auto common = product(*a, *b);
  return common && common->empty();
}

bool Schema::numbers_apart(const Form& written, const Form& allowed) {
  const NumberLimits a = numbers(written), b = numbers(allowed);
  const auto below = [](const NumberLimits& lower, const NumberLimits& upper) {
    if (!lower.high || !upper.low) return false;
    const int order = compare(lower.high->value, upper.low->value);
    return order < 0 || (order == 0 && (lower.high->exclusive || upper.low->exclusive));
  };
  return below(a, b) || below(b, a);
}

bool Schema::objects_apart(const Form& written, const Form& allowed, int depth) {
  const ObjectLimits a = objects(written.all), b = objects(allowed.all);
  std::unordered_map<std::string_view, const ObjectLimits::Property*> of_a, of_b;
  for (const auto& property : a.properties) of_a.emplace(property.name, &property);
  for (const auto& property : b.properties) of_b.emplace(property.name, &property);
  for (const auto& [name, property] : of_b)
    if (property->required && !a.writes_others() && !of_a.contains(name)) return true;
  for (const auto& property : a.properties) {
    if (!property.required) continue;
    const auto other = of_b.find(property.name);
    if (other == of_b.end()) {
      if (b.closed) return true;
      continue;
    }
    const auto writes = forms(property.value, Reading::kWritten);
    const auto allows = forms(other->second->value, Reading::kAllowed);
    const auto alone = [&](const Form& one) {
      return std::all_of(allows.begin(), allows.end(),
                         [&](const Form& each) { return apart(one, each, depth + 1); });
    };
    if (!error_ && std::all_of(writes.begin(), writes.end(), alone)) return true;
  }
  return false;
}

}  // namespace pagedkv::server
