#include "plan/report.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace loadplan {
namespace {

constexpr size_t kMaxListed = 10;  // of any list of names
constexpr std::array kKinds = {EntryKind::kDirect, EntryKind::kDerived, EntryKind::kFallback,
                               EntryKind::kUnneeded};

std::string Count(size_t number, const std::string& noun) {
  return absl::StrCat(number, " ", noun, number == 1 ? "" : "s");
}

// Names may hold anything, in files that others made above all. What would move a terminal's cursor
// or colour its text, or turn the direction of a line, is written as its number.
std::string Printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](size_t at) {
      return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U;
    };
    const unsigned first = byte(i), second = byte(i + 1), third = byte(i + 2);
    if (first < 0x20 || first == 0x7F) {
      absl::StrAppendFormat(&out, "\\x%02x", first);
    } else if (first == 0xC2 && second >= 0x80 && second < 0xA0) {
      absl::StrAppendFormat(&out, "\\x%02x", second);
      i += 1;
    } else if (first == 0xE2 && ((second == 0x80 && third >= 0xA8 && third <= 0xAE) ||
                                 (second == 0x81 && third >= 0xA6 && third <= 0xA9))) {
      absl::StrAppendFormat(&out, "\\u%04x", 0x2000 | (second & 0x3F) << 6 | (third & 0x3F));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

// The reason with its numbers and its quoted names of tensors folded. A quoted
// operator (`aten::mul.Tensor`) stays: it is what tells reasons apart.
std::string Pattern(const std::string& reason) {
  std::string pattern;
  for (size_t i = 0; i < reason.size(); ++i) {
    const size_t close = reason[i] == '`' ? reason.find('`', i + 1) : std::string::npos;
    if (close != std::string::npos) {
      const std::string quoted = reason.substr(i, close - i + 1);
      pattern += quoted.find("::") == std::string::npos ? "`#`" : quoted;
      i = close;
    } else if (reason[i] < '0' || reason[i] > '9') {
      pattern += reason[i];
    } else if (pattern.empty() || pattern.back() != '#') {
      pattern += '#';
    }
  }
  return pattern;
}

void AppendKinds(const LoadPlan& plan, std::string& out) {
  struct Sum {
    size_t names = 0;
    Index read = 0;
    Index total = 0;
  };
  std::array<Sum, kKinds.size()> sums;
  Sum all;
  for (size_t n = 0; n < plan.sources().size(); ++n) {
    Sum& sum = sums[static_cast<size_t>(plan.entries()[n].kind)];
    const Index read = plan.ReadNbytes(static_cast<std::int32_t>(n));
    const Index total = plan.sources()[n].nbytes();
    ++sum.names;
    sum.read += read;
    sum.total += total;
    all.read += read;
    all.total += total;
  }
  absl::StrAppend(&out, "load plan: ", Count(plan.sources().size(), "name"), ", ",
                  FormatNbytes(all.total), "; reads ", FormatNbytes(all.read), "\n");
  for (const EntryKind kind : kKinds) {
    const Sum& sum = sums[static_cast<size_t>(kind)];
    if (sum.names == 0) continue;
    absl::StrAppendFormat(&out, "  %-8s %12s %12s read of %s\n", std::string(ToString(kind)),
                          Count(sum.names, "name"), FormatNbytes(sum.read),
                          FormatNbytes(sum.total));
  }
}

void AppendReasons(const LoadPlan& plan, EntryKind kind, const std::string& title,
                   std::string& out) {
  struct Group {
    std::string reason;
    std::vector<size_t> names;
  };
  std::vector<Group> groups;
  absl::flat_hash_map<std::string, size_t> group_of;
  for (size_t n = 0; n < plan.entries().size(); ++n) {
    const PlanEntry& entry = plan.entries()[n];
    if (entry.kind != kind || entry.reason.empty()) continue;
    const auto [found, is_new] = group_of.emplace(Pattern(entry.reason), groups.size());
    if (is_new) groups.push_back({entry.reason, {}});
    groups[found->second].names.push_back(n);
  }
  if (groups.empty()) return;
  std::stable_sort(groups.begin(), groups.end(),
                   [](const Group& a, const Group& b) { return a.names.size() > b.names.size(); });
  absl::StrAppend(&out, title, "\n");
  for (const Group& group : groups) {
    absl::StrAppend(&out, "  ", Count(group.names.size(), "name"), ": ", Printable(group.reason),
                    "\n    ");
    for (size_t i = 0; i < std::min(group.names.size(), kMaxListed); ++i) {
      absl::StrAppend(&out, i == 0 ? "" : ", ", Printable(plan.sources()[group.names[i]].name));
    }
    absl::StrAppend(&out, group.names.size() > kMaxListed ? ", ...\n" : "\n");
  }
}

Index SumNbytes(const std::vector<WriteItem>& items) {
  Index nbytes = 0;
  for (const WriteItem& item : items) nbytes += item.map.nbytes();
  return nbytes;
}

void AppendNameless(const LoadPlan& plan, std::string& out) {
  const auto line = [&](const std::string& what, const std::vector<WriteItem>& items) {
    if (items.empty()) return;
    absl::StrAppend(&out, what, ": ", Count(items.size(), "write"), ", ",
                    FormatNbytes(SumNbytes(items)), "\n");
  };
  line("constants", plan.constants());
  line("copies of live bytes", plan.live_copies());
  line("computed", plan.value_writes());
  if (!plan.programs().empty()) {
    absl::StrAppend(&out, "programs: ", Count(plan.programs().size(), "operator"), "\n");
  }
}

void AppendOverlaps(const LoadPlan& plan, std::string& out) {
  if (plan.overlaps().empty()) return;
  absl::StrAppend(&out, "overlaps: ", Count(plan.overlaps().size(), "pair"), "\n");
  for (size_t i = 0; i < std::min(plan.overlaps().size(), kMaxListed); ++i) {
    const NameOverlap& overlap = plan.overlaps()[i];
    const auto target =
        std::find_if(plan.targets().begin(), plan.targets().end(),
                     [&](const TargetTensor& t) { return t.storage == overlap.storage; });
    const auto name = [&](std::int32_t source) {
      return Printable(plan.sources()[static_cast<size_t>(source)].name);
    };
    absl::StrAppend(&out, "  `", name(overlap.first), "` and `", name(overlap.second), "` share ",
                    FormatNbytes(overlap.nbytes), " of `",
                    target == plan.targets().end() ? "" : Printable(target->name), "`\n");
  }
  if (plan.overlaps().size() > kMaxListed) absl::StrAppend(&out, "  ...\n");
}

void AppendUncovered(const LoadPlan& plan, std::string& out) {
  if (plan.uncovered().empty()) return;
  absl::StrAppend(&out, "not written: ", Count(plan.uncovered().size(), "target"), "\n");
  for (size_t i = 0; i < std::min(plan.uncovered().size(), kMaxListed); ++i) {
    const UncoveredTarget& target = plan.uncovered()[i];
    absl::StrAppend(&out, "  `", Printable(plan.targets()[static_cast<size_t>(target.target)].name),
                    "`: ", FormatNbytes(target.nbytes), " of ", FormatNbytes(target.total_nbytes),
                    "\n");
  }
  if (plan.uncovered().size() > kMaxListed) absl::StrAppend(&out, "  ...\n");
}

}  // namespace

std::string FormatNbytes(Index nbytes) {
  if (nbytes < 1024) return Count(static_cast<size_t>(nbytes), "byte");
  static constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(nbytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string MakeReport(const LoadPlan& plan) {
  std::string out;
  AppendKinds(plan, out);
  AppendReasons(plan, EntryKind::kFallback, "fallbacks", out);
  AppendReasons(plan, EntryKind::kDerived, "derived", out);
  AppendReasons(plan, EntryKind::kUnneeded, "unneeded", out);
  AppendNameless(plan, out);
  AppendOverlaps(plan, out);
  AppendUncovered(plan, out);
  absl::StrAppendFormat(&out, "seconds: trace %.3f, build %.3f\n", plan.trace_seconds,
                        plan.build_seconds);
  return out;
}

}  // namespace loadplan
