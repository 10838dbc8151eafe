#include "transfer/schedule.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <tuple>
#include <utility>

#include "geometry/at.h"

namespace loadplan {
namespace {

void CutChunks(NameClass& name_class, Index max_nbytes) {
  for (std::size_t i = 0; i < name_class.items.size(); ++i) {
    ScheduleItem& item = name_class.items[i];
    item.first_chunk = static_cast<std::int32_t>(name_class.chunks.size());
    for (Box& box : SplitBox(item.box, name_class.dtype.itemsize, max_nbytes)) {
      const Index nbytes = box.num_elements() * name_class.dtype.itemsize;
      name_class.chunks.push_back({static_cast<std::int32_t>(i), std::move(box), nbytes});
    }
    item.num_chunks = static_cast<std::int32_t>(name_class.chunks.size()) - item.first_chunk;
  }
}

// Items that many ranks hold and few names share out are cut, so that each rank may send a part.
void CutForOwners(NameClass& name_class, Index min_nbytes) {
  std::vector<ScheduleItem> items;
  for (ScheduleItem& item : name_class.items) {
    const auto owners = static_cast<Index>(item.senders.size());
    const bool is_local = std::ranges::binary_search(item.senders, item.receiver);
    const Index parts = std::min((owners + name_class.count - 1) / name_class.count,
                                 item.nbytes / std::max<Index>(min_nbytes, 1));
    if (is_local || owners < 2 || parts < 2) {
      items.push_back(std::move(item));
      continue;
    }
    for (Box& box : Stripes(item.box, parts)) {
      ScheduleItem part = item;
      part.nbytes = box.num_elements() * name_class.dtype.itemsize;
      part.box = std::move(box);
      items.push_back(std::move(part));
    }
  }
  name_class.items = std::move(items);
}

}  // namespace

absl::StatusOr<Schedule> Schedule::Make(std::span<const RankTables> ranks,
                                        const ScheduleOptions& options) {
  Schedule schedule;
  schedule.options_ = options;
  schedule.traffic_.num_ranks = static_cast<std::int32_t>(ranks.size());
  const TableFolding folding(ranks);
  schedule.names_ = folding.names();
  const GeometryTable::Names& names = *schedule.names_;
  // A state becomes a class the first time that a name is in it.
  constexpr std::int32_t kNew = -2;
  std::vector<std::int32_t> class_of_state(folding.num_states(), kNew);
  schedule.class_of_.resize(names.size());
  schedule.ordinal_.resize(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::int32_t state = folding.state_of()[i];
    std::int32_t& index = At(class_of_state, state);
    if (index == kNew) {
      absl::StatusOr<NameClass> made =
          MakeNameClass(names[i], folding.StatementsOf(state),
                        {.whole = options.must_cover, .needed = options.must_hold});
      if (!made.ok()) return made.status();
      index = made->items.empty() ? -1 : static_cast<std::int32_t>(schedule.classes_.size());
      if (index >= 0) schedule.classes_.push_back(*std::move(made));
    }
    schedule.class_of_[i] = index;
    if (index >= 0) schedule.ordinal_[i] = At(schedule.classes_, index).count++;
  }
  for (NameClass& name_class : schedule.classes_) {
    CutForOwners(name_class, options.solo_nbytes);
    CutChunks(name_class, options.bucket_nbytes);
  }
  schedule.DealOut();
  if (options.counts_traffic) schedule.CountTraffic();
  return schedule;
}

// Chooses for each item which of its owners send which names: see Note [Schedule].
void Schedule::DealOut() {
  std::vector<Index> load(static_cast<std::size_t>(num_ranks()), 0);
  struct Shared {
    Index nbytes;
    NameClass* name_class;
    ScheduleItem* item;
  };
  std::vector<Shared> shared;
  for (NameClass& name_class : classes_) {
    for (ScheduleItem& item : name_class.items) {
      if (std::ranges::binary_search(item.senders, item.receiver)) {
        item.senders = {item.receiver};
      } else if (item.senders.size() == 1) {
        At(load, item.senders.front()) += item.nbytes * name_class.count;
      } else {
        shared.push_back({item.nbytes * name_class.count, &name_class, &item});
      }
    }
  }
  traffic_.max_sent_bound = load.empty() ? 0 : std::ranges::max(load);
  std::ranges::stable_sort(shared, std::greater<>(), &Shared::nbytes);
  for (const Shared& next : shared) {
    std::vector<std::int32_t>& senders = next.item->senders;
    const auto num = static_cast<std::int32_t>(senders.size());
    const std::int32_t count = next.name_class->count;
    const std::int32_t once_more = count % num;
    // The first `once_more` of them get one name more than the others. All are sorted: every rank
    // has to come to the same order, whatever library it was built with.
    std::ranges::sort(senders, {},
                      [&](std::int32_t rank) { return std::pair(At(load, rank), rank); });
    if (count < num) senders.resize(static_cast<std::size_t>(count));
    for (std::size_t j = 0; j < senders.size(); ++j) {
      const std::int32_t turns = count / num + (static_cast<std::int32_t>(j) < once_more ? 1 : 0);
      At(load, senders[j]) += next.item->nbytes * turns;
    }
  }
}

void Schedule::CountTraffic() {
  Traffic& traffic = traffic_;
  const auto n = static_cast<std::size_t>(num_ranks());
  traffic.links.assign(n * n, 0);
  traffic.sent.assign(n, 0);
  traffic.received.assign(n, 0);
  std::vector<char> holds(n, 0);
  for (const NameClass& name_class : classes_) {
    traffic.broadcast_nbytes += name_class.nbytes() * name_class.count * name_class.num_receivers;
    for (const ScheduleItem& item : name_class.items) {
      const auto num = static_cast<std::int32_t>(item.senders.size());
      for (std::int32_t j = 0; j < num; ++j) {
        const std::int32_t sender = At(item.senders, j);
        const std::int32_t turns = (name_class.count - j + num - 1) / num;
        const Index nbytes = item.nbytes * turns;
        At(holds, sender) = 1;
        traffic.links[static_cast<std::size_t>(sender) * n +
                      static_cast<std::size_t>(item.receiver)] += nbytes;
        if (sender == item.receiver) {
          traffic.local_nbytes += nbytes;
          continue;
        }
        At(traffic.sent, sender) += nbytes;
        At(traffic.received, item.receiver) += nbytes;
        traffic.total_nbytes += nbytes;
      }
    }
  }
  if (n == 0) return;
  traffic.max_received_bound = std::ranges::max(traffic.received);
  const Index senders = std::max<Index>(std::ranges::count(holds, 1), 1);
  traffic.max_sent_bound =
      std::max(traffic.max_sent_bound, (traffic.total_nbytes + senders - 1) / senders);
}

std::vector<Message> Schedule::MessagesOf(std::int32_t rank) const {
  // Of each class, the items that may be this rank's.
  std::vector<std::vector<std::int32_t>> items_of_class(classes_.size());
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    for (std::size_t i = 0; i < classes_[c].items.size(); ++i) {
      const ScheduleItem& item = classes_[c].items[i];
      if (item.receiver == rank || std::ranges::find(item.senders, rank) != item.senders.end()) {
        items_of_class[c].push_back(static_cast<std::int32_t>(i));
      }
    }
  }
  // The messages of each pair, by 2 * peer + (whether this rank sends).
  std::vector<std::vector<Message>> of_pair(2 * static_cast<std::size_t>(num_ranks()));
  for (std::size_t n = 0; n < class_of_.size(); ++n) {
    if (class_of_[n] < 0) continue;
    const NameClass& name_class = At(classes_, class_of_[n]);
    for (const std::int32_t index : At(items_of_class, class_of_[n])) {
      const ScheduleItem& item = At(name_class.items, index);
      const std::int32_t sender = item.SenderOf(ordinal_[n]);
      if (sender != rank && item.receiver != rank) continue;
      const bool sends = sender == rank && item.receiver != rank;
      std::vector<Message>& messages =
          At(of_pair, 2 * (sends ? item.receiver : sender) + (sends ? 1 : 0));
      for (std::int32_t k = 0; k < item.num_chunks; ++k) {
        const MessagePart part{static_cast<std::int32_t>(n), item.first_chunk + k};
        const Index nbytes = At(name_class.chunks, part.chunk).nbytes;
        if (messages.empty() || nbytes >= options_.solo_nbytes ||
            messages.back().nbytes + nbytes > options_.bucket_nbytes ||
            (messages.back().parts.size() == 1 && messages.back().nbytes >= options_.solo_nbytes)) {
          messages.push_back(
              {sender, item.receiver, static_cast<std::int32_t>(messages.size()), 0, {}});
        }
        messages.back().nbytes += nbytes;
        messages.back().parts.push_back(part);
      }
    }
  }
  std::vector<Message> all;
  for (std::vector<Message>& messages : of_pair) {
    std::ranges::move(messages, std::back_inserter(all));
  }
  std::ranges::stable_sort(all, {}, [this](const Message& message) {
    const std::int32_t shift = (message.receiver - message.sender + num_ranks()) % num_ranks();
    return std::tuple(message.index, shift, message.sender);
  });
  return all;
}

std::vector<std::int32_t> Schedule::NumPartsTo(std::int32_t rank) const {
  std::vector<std::int32_t> of_class(classes_.size(), 0);
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    for (const ScheduleItem& item : classes_[c].items) {
      if (item.receiver == rank) of_class[c] += item.num_chunks;
    }
  }
  std::vector<std::int32_t> of_name(class_of_.size(), 0);
  for (std::size_t n = 0; n < class_of_.size(); ++n) {
    if (class_of_[n] >= 0) of_name[n] = At(of_class, class_of_[n]);
  }
  return of_name;
}

}  // namespace loadplan
