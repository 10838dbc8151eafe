// Schedule: which rank sends which box of which tensor to which rank, in which message.
//
//   auto schedule = Schedule::Make(tables_of_all_ranks, {}).value();
//   for (const Message& message : schedule.MessagesOf(rank)) ...
#ifndef LOADPLAN_TRANSFER_SCHEDULE_H_
#define LOADPLAN_TRANSFER_SCHEDULE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "geometry/box.h"
#include "geometry/export.h"
#include "transfer/geometry_table.h"
#include "transfer/name_class.h"
#include "transfer/table_folding.h"

namespace loadplan {

// Note [Schedule]
//
// Every rank makes the schedule from the same tables and so makes the same one.
//
//   names    those with the same geometry everywhere (held, needed) are one *class*: planned once,
//            instantiated per name
//   items    of a class: box that one receiver needs ∩ box that one shard holds, and the ranks
//            that hold it. Each element that a receiver needs is in one of its items.
//   owners   where several ranks hold it, the names of a class take turns. Classes are dealt out by
//            size, largest first, to the ranks with the least to send so far. A rank that needs
//            what it holds copies it. Where there are fewer names than owners, the item is cut.
//   chunks   of an item: boxes of `bucket_nbytes` at most
//   messages of a pair of ranks: chunks in the order of names. A chunk of `solo_nbytes` or more is
//   a
//            message of its own, so that it can be received in place; others are packed
//            together, up to `bucket_nbytes`.
//
// Each rank handles its messages by ascending (index within the pair, receiver - sender). That is
// one order for all: whatever bound a rank sets itself for messages in flight, both ends of the
// first unfinished one get to it, and nobody waits in a circle.

struct ScheduleOptions {
  Index bucket_nbytes = Index{8} << 20;
  Index solo_nbytes = Index{1} << 20;
  // Whether each tensor that is held has to be held whole, also where nobody needs it.
  bool must_cover = true;
  // Whether each tensor that a rank needs has to be held; without, one that nobody holds is left
  // out.
  bool must_hold = true;
  // Without, traffic() has no more than the number of ranks; it is quadratic in that.
  bool counts_traffic = true;
};

// A chunk of a name: an index into Schedule::names(), and one into the chunks of its class.
struct MessagePart {
  std::int32_t name = 0;
  std::int32_t chunk = 0;
};

// Packed one after another, row-major, without gaps.
struct Message {
  std::int32_t sender = 0;
  std::int32_t receiver = 0;
  std::int32_t index = 0;  // among the messages of this pair
  Index nbytes = 0;
  std::vector<MessagePart> parts;
};

// Bytes between ranks.
struct Traffic {
  std::int32_t num_ranks = 0;
  std::vector<Index> links;      // [sender * num_ranks + receiver]; the diagonal is copied
  std::vector<Index> sent;       // per rank, without what it copies
  std::vector<Index> received;   // likewise
  Index total_nbytes = 0;        // over links
  Index local_nbytes = 0;        // copied within a rank
  Index broadcast_nbytes = 0;    // what whole tensors to every receiver would be
  Index max_sent_bound = 0;      // what the busiest sender has to send in any schedule, at least
  Index max_received_bound = 0;  // what the busiest receiver receives in any schedule
};

// Immutable.
class LOADPLAN_API Schedule {
 public:
  // Parties are ranks 0, 1, ... of the group. InvalidArgument, naming tensor, box and rank: shapes
  // or dtypes of a name that differ between ranks, a name or a box that some rank needs and none
  // holds, and what DistinctBoxes refuses.
  static absl::StatusOr<Schedule> Make(std::span<const RankTables> ranks,
                                       const ScheduleOptions& options);

  std::int32_t num_ranks() const { return traffic_.num_ranks; }
  const GeometryTable::Names& names() const { return *names_; }
  // Whether some rank needs a byte of it.
  bool IsNeeded(std::int32_t name) const { return ClassIndex(name) >= 0; }
  const NameClass& ClassOf(std::int32_t name) const {
    return classes_[static_cast<std::size_t>(ClassIndex(name))];
  }
  const ScheduleChunk& ChunkOf(const MessagePart& part) const {
    return ClassOf(part.name).chunks[static_cast<std::size_t>(part.chunk)];
  }

  // What `rank` sends and receives, in the order in which it has to begin with them; messages to
  // itself are copies. O(names + parts of this rank).
  std::vector<Message> MessagesOf(std::int32_t rank) const;
  // Parts that cross to `rank`, of each name in names().
  std::vector<std::int32_t> NumPartsTo(std::int32_t rank) const;

  const Traffic& traffic() const { return traffic_; }
  std::size_t num_classes() const { return classes_.size(); }
  // Bytes per link, balance, lower bounds. For people.
  std::string Report() const;

 private:
  std::int32_t ClassIndex(std::int32_t name) const {
    return class_of_[static_cast<std::size_t>(name)];
  }
  void DealOut();
  void CountTraffic();

  ScheduleOptions options_;
  std::shared_ptr<const GeometryTable::Names> names_;
  std::vector<std::int32_t> class_of_;  // per name; -1: nobody needs it
  std::vector<std::int32_t> ordinal_;   // per name: how many of its class come before it
  std::vector<NameClass> classes_;
  Traffic traffic_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_SCHEDULE_H_
