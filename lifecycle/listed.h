// Listed: many things in one message.
#ifndef LOADPLAN_LIFECYCLE_LISTED_H_
#define LOADPLAN_LIFECYCLE_LISTED_H_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"

namespace loadplan {

// "`a`, `b` and 7 more": the first ten of `items`, each as `text_of` says it.
template <typename Items, typename TextOf = std::identity>
std::string Listed(const Items& items, const TextOf& text_of = {}) {
  constexpr std::size_t kMost = 10;
  const std::size_t shown = std::min(std::size(items), kMost);
  std::string text;
  for (std::size_t i = 0; i < shown; ++i) {
    absl::StrAppend(&text, i > 0 ? ", " : "", text_of(items[i]));
  }
  if (std::size(items) > shown) {
    absl::StrAppend(&text, " and ", std::size(items) - shown, " more");
  }
  return text;
}

}  // namespace loadplan

#endif  // LOADPLAN_LIFECYCLE_LISTED_H_
