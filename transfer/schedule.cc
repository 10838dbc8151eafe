#include "transfer/schedule.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace loadplan {
namespace {

using Names = GeometryTable::Names;

template <typename Vector, typename I>
auto& At(Vector& vector, I index) {
  return vector[static_cast<std::size_t>(index)];
}

// A table and all ranks that have exactly it.
struct DistinctTable {
  const GeometryTable* table = nullptr;
  bool is_held = false;
  std::vector<std::int32_t> ranks;
};

std::vector<DistinctTable> DistinctTables(std::span<const RankTables> ranks) {
  std::vector<DistinctTable> distinct;
  absl::flat_hash_map<std::pair<const GeometryTable*, bool>, std::size_t> index;
  const auto add = [&](const GeometryTable* table, bool is_held, std::size_t rank) {
    if (table == nullptr) return;
    const auto [found, is_new] = index.emplace(std::pair(table, is_held), distinct.size());
    if (is_new) distinct.push_back({table, is_held, {}});
    distinct[found->second].ranks.push_back(static_cast<std::int32_t>(rank));
  };
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    add(ranks[rank].held.get(), true, rank);
    add(ranks[rank].needed.get(), false, rank);
  }
  return distinct;
}

// All names of the tables, sorted.
std::shared_ptr<const Names> UnionOfNames(std::span<const DistinctTable> tables) {
  std::vector<std::shared_ptr<const Names>> lists;
  for (const DistinctTable& item : tables) {
    const auto same = [&](const auto& list) {
      return list == item.table->names() || *list == *item.table->names();
    };
    if (std::ranges::none_of(lists, same)) lists.push_back(item.table->names());
  }
  if (lists.empty()) return std::make_shared<const Names>();
  std::shared_ptr<const Names> all = lists.front();
  for (std::size_t i = 1; i < lists.size(); ++i) {
    Names merged;
    std::ranges::set_union(*all, *lists[i], std::back_inserter(merged));
    all = std::make_shared<const Names>(std::move(merged));
  }
  return all;
}

// What the tables say of each name, folded table by table: names with the same history are in the
// same state. 64 tables of 70,000 names are 4.5 million steps of one look-up each.
class Folding {
 public:
  explicit Folding(const Names& names) : names_(names), state_of_(names.size(), 0) {}

  void Add(std::int32_t table_index, const GeometryTable& table) {
    absl::flat_hash_map<std::uint64_t, std::int32_t> next;
    std::uint64_t last_key = ~std::uint64_t{0};
    std::int32_t last_state = 0;
    const bool same_names = table.names().get() == &names_;
    std::size_t at = 0;
    for (std::size_t i = 0; i < table.names()->size(); ++i, ++at) {
      if (!same_names) {
        while (names_[at] != (*table.names())[i]) ++at;
      }
      std::int32_t& state = state_of_[at];
      const std::int32_t geometry = table.geometry_of()[i];
      const std::uint64_t key =
          (static_cast<std::uint64_t>(state) << 32) | static_cast<std::uint64_t>(geometry);
      if (key != last_key) {
        const auto [found, is_new] = next.emplace(key, static_cast<std::int32_t>(states_.size()));
        if (is_new) states_.push_back({state, table_index, geometry});
        last_key = key;
        last_state = found->second;
      }
      state = last_state;
    }
  }

  const std::vector<std::int32_t>& state_of() const { return state_of_; }
  // What was said of the names in `state`.
  std::vector<TableStatement> StatementsOf(std::int32_t state,
                                           std::span<const DistinctTable> tables) const {
    std::vector<TableStatement> statements;
    for (; state != 0; state = At(states_, state).previous) {
      const State& step = At(states_, state);
      const DistinctTable& item = At(tables, step.table);
      statements.push_back(
          {&At(item.table->geometries(), step.geometry), &item.ranks, item.is_held});
    }
    std::ranges::reverse(statements);
    return statements;
  }
  std::size_t num_states() const { return states_.size(); }

 private:
  struct State {
    std::int32_t previous = 0;
    std::int32_t table = -1;
    std::int32_t geometry = -1;
  };
  const Names& names_;
  std::vector<State> states_{State{}};  // 0: nothing was said
  std::vector<std::int32_t> state_of_;
};

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
  const std::vector<DistinctTable> tables = DistinctTables(ranks);
  schedule.names_ = UnionOfNames(tables);
  const Names& names = *schedule.names_;
  Folding folding(names);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    folding.Add(static_cast<std::int32_t>(i), *tables[i].table);
  }
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
          MakeNameClass(names[i], folding.StatementsOf(state, tables), options.must_cover);
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
  schedule.CountTraffic();
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
    // The first `once_more` of them get one name more than the others.
    std::partial_sort(senders.begin(), senders.begin() + once_more, senders.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return std::pair(At(load, a), a) < std::pair(At(load, b), b);
                      });
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
        At(traffic.links, sender * num_ranks() + item.receiver) += nbytes;
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
