#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/report.h"
#include "transfer/schedule.h"

namespace loadplan {
namespace {

constexpr std::int32_t kMaxRanksShown = 16;

double Ratio(Index value, Index bound) {
  return bound == 0 ? 1.0 : static_cast<double>(value) / static_cast<double>(bound);
}

Index Max(const std::vector<Index>& values) {
  return values.empty() ? 0 : *std::ranges::max_element(values);
}

}  // namespace

std::string Schedule::Report() const {
  const Traffic& t = traffic_;
  const auto needed = std::ranges::count_if(class_of_, [](std::int32_t c) { return c >= 0; });
  std::string out = absl::StrCat("schedule: ", needed, " of ", names().size(), " names in ",
                                 num_classes(), " classes, ", t.num_ranks, " ranks\n");
  absl::StrAppend(&out, "  over the network ", FormatNbytes(t.total_nbytes), ", within a rank ",
                  FormatNbytes(t.local_nbytes), "; whole tensors to each receiver would be ",
                  FormatNbytes(t.broadcast_nbytes), "\n");
  absl::StrAppendFormat(&out, "  busiest sender   %s, %.2f of the lower bound\n",
                        FormatNbytes(Max(t.sent)), Ratio(Max(t.sent), t.max_sent_bound));
  absl::StrAppendFormat(&out, "  busiest receiver %s, %.2f of the lower bound\n",
                        FormatNbytes(Max(t.received)),
                        Ratio(Max(t.received), t.max_received_bound));
  if (t.num_ranks > kMaxRanksShown) return out;
  for (std::int32_t from = 0; from < t.num_ranks; ++from) {
    if (t.sent[static_cast<std::size_t>(from)] == 0) continue;
    absl::StrAppend(&out, "  rank ", from, " sends");
    for (std::int32_t to = 0; to < t.num_ranks; ++to) {
      const Index nbytes = t.links[static_cast<std::size_t>(from * t.num_ranks + to)];
      if (nbytes == 0 || from == to) continue;
      absl::StrAppend(&out, "  ", FormatNbytes(nbytes), " to ", to);
    }
    out += "\n";
  }
  return out;
}

}  // namespace loadplan
