// The inside of ShardExchange: the messages of one update.
#ifndef LOADPLAN_TRANSFER_EXCHANGE_RUN_H_
#define LOADPLAN_TRANSFER_EXCHANGE_RUN_H_

#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transfer/exchange.h"
#include "transfer/landing.h"

namespace loadplan {

// Packing, wire and unpacking overlap: while this thread packs or unpacks one message, the threads
// of the backend move those that are posted.
class ShardExchange::Run {
 public:
  Run(ShardExchange& exchange, ShardSource* shards, ReloadSession* session);

  // All messages of this rank.
  absl::Status Move();
  const ExchangeReceipt& receipt() const { return receipt_; }

 private:
  // A message that is posted and not finished.
  struct InFlight {
    const Message* message = nullptr;
    bool sends = false;
    bool is_staged = false;
    at::Tensor staging;
    WorkPtr work;
  };

  absl::Status PostBatch(std::size_t& next);
  absl::Status Post(const Message& message);
  absl::StatusOr<at::Tensor> BytesToSend(InFlight& item);
  absl::StatusOr<at::Tensor> BytesToReceive(InFlight& item);
  absl::Status FinishOldest();
  absl::Status LandMessage(const InFlight& item);
  absl::Status CopyOwn(const Message& message);
  absl::StatusOr<LocalBytes> Find(const Message& message, const MessagePart& part) const;
  at::Tensor TakeStaging(Index nbytes);

  ShardExchange& exchange_;
  ShardSource* const shards_;
  std::optional<Landing> landing_;
  std::deque<InFlight> in_flight_;
  Index in_flight_nbytes_ = 0;
  ExchangeReceipt receipt_;
};

}  // namespace loadplan

#endif  // LOADPLAN_TRANSFER_EXCHANGE_RUN_H_
