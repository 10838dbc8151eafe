#include "transfer/checkpoint_index.h"

#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace loadplan {
namespace {

bool IsInside(std::string_view file) {
  const std::filesystem::path path(file);
  return !path.empty() && path.is_relative() && std::ranges::find(path, "..") == path.end() &&
         file.find('\0') == std::string_view::npos;
}

}  // namespace

absl::StatusOr<std::vector<IndexedFile>> ParseCheckpointIndex(std::string_view json) {
  simdjson::dom::parser parser;
  simdjson::dom::object weight_map;
  if (parser.parse(json.data(), json.size())["weight_map"].get(weight_map) != simdjson::SUCCESS) {
    return absl::InvalidArgumentError("is no index: it has no `weight_map`");
  }
  std::vector<IndexedFile> files;
  absl::flat_hash_map<std::string, std::size_t> places;
  absl::flat_hash_set<std::string> names;
  for (const auto& [key, value] : weight_map) {
    std::string name(key);
    std::string_view file;
    if (value.get(file) != simdjson::SUCCESS || !IsInside(file)) {
      return absl::InvalidArgumentError(
          absl::StrCat("places `", name, "` in no file of its folder"));
    }
    if (!names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat("places `", name, "` twice"));
    }
    const auto [place, is_new] = places.emplace(std::string(file), files.size());
    if (is_new) files.push_back({std::string(file), {}});
    files[place->second].names.push_back(std::move(name));
  }
  return files;
}

}  // namespace loadplan
