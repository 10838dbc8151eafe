#include "plan/write_index.h"

#include <algorithm>
#include <array>
#include <utility>

namespace loadplan {
namespace {

// Few enough to look at one by one.
constexpr std::uint32_t kLeafSize = 8;

// What `Node::left` holds while a node waits to be split; the axes take turns.
constexpr std::int32_t kSplitByAddress = -1;
constexpr std::int32_t kSplitByTime = -2;

bool Meets(const ByteRange& a, const ByteRange& b) { return a.start < b.stop && b.start < a.stop; }

}  // namespace

WriteIndex::WriteIndex(std::vector<TimedSpan> writes) : writes_(std::move(writes)) {
  if (writes_.empty()) return;
  nodes_.reserve(writes_.size() / 2 + 2);
  nodes_.push_back(Summarise(0, static_cast<std::uint32_t>(writes_.size())));
  // Children are appended while the vector is walked: every node gets its turn.
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    Split(node, nodes_[node].left == kSplitByTime);
  }
}

WriteIndex::Node WriteIndex::Summarise(std::uint32_t begin, std::uint32_t end) const {
  Node node{.hull = writes_[begin].span,
            .min_time = writes_[begin].time,
            .max_time = writes_[begin].time,
            .begin = begin,
            .end = end,
            .left = kSplitByAddress};
  for (std::uint32_t i = begin; i < end; ++i) {
    node.hull.start = std::min(node.hull.start, writes_[i].span.start);
    node.hull.stop = std::max(node.hull.stop, writes_[i].span.stop);
    node.min_time = std::min(node.min_time, writes_[i].time);
    node.max_time = std::max(node.max_time, writes_[i].time);
  }
  return node;
}

void WriteIndex::Split(std::size_t node, bool by_time) {
  const std::uint32_t begin = nodes_[node].begin;
  const std::uint32_t end = nodes_[node].end;
  if (end - begin <= kLeafSize) {
    nodes_[node].left = -1;
    return;
  }
  const std::uint32_t middle = begin + (end - begin) / 2;
  std::nth_element(writes_.begin() + begin, writes_.begin() + middle, writes_.begin() + end,
                   [by_time](const TimedSpan& a, const TimedSpan& b) {
                     return by_time ? a.time < b.time : a.span.start < b.span.start;
                   });
  Node left = Summarise(begin, middle);
  Node right = Summarise(middle, end);
  left.left = right.left = by_time ? kSplitByAddress : kSplitByTime;
  nodes_[node].left = static_cast<std::int32_t>(nodes_.size());
  nodes_.push_back(left);
  nodes_.push_back(right);
}

Index WriteIndex::NewestMeeting(ByteRange range, Index since, Index before) const {
  if (nodes_.empty() || range.empty()) return -1;
  Index best = -1;
  // Two axes halve in turn: the depth stays under 2 * 32 + 1.
  std::array<std::int32_t, 80> stack;
  std::size_t depth = 0;
  stack[depth++] = 0;
  while (depth > 0) {
    const Node& node = nodes_[static_cast<std::size_t>(stack[--depth])];
    if (node.max_time <= best || node.max_time < since || node.min_time >= before ||
        !Meets(node.hull, range)) {
      continue;
    }
    if (node.left >= 0) {
      const auto left = static_cast<std::size_t>(node.left);
      const bool left_is_newer = nodes_[left].max_time > nodes_[left + 1].max_time;
      stack[depth++] = node.left + (left_is_newer ? 1 : 0);
      stack[depth++] = node.left + (left_is_newer ? 0 : 1);
      continue;
    }
    for (std::uint32_t i = node.begin; i < node.end; ++i) {
      const TimedSpan& write = writes_[i];
      if (write.time > best && write.time >= since && write.time < before &&
          Meets(write.span, range)) {
        best = write.time;
      }
    }
  }
  return best;
}

void WriteIndex::ForEachMeeting(ByteRange range, Index before,
                                const std::function<void(Index)>& f) const {
  if (nodes_.empty() || range.empty()) return;
  std::vector<std::int32_t> stack = {0};
  while (!stack.empty()) {
    const Node& node = nodes_[static_cast<std::size_t>(stack.back())];
    stack.pop_back();
    if (node.min_time >= before || !Meets(node.hull, range)) continue;
    if (node.left >= 0) {
      stack.push_back(node.left);
      stack.push_back(node.left + 1);
      continue;
    }
    for (std::uint32_t i = node.begin; i < node.end; ++i) {
      if (writes_[i].time < before && Meets(writes_[i].span, range)) f(writes_[i].time);
    }
  }
}

}  // namespace loadplan
