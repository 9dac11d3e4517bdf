//! The order of waiting processes: tickets, which are short leases beside the one that is waited for.

use std::time::Duration;

use super::{
    held::Lease,
    request::{LeaseRequest, Mode, Place},
};
use crate::{error::Result, store::LeaseStore, wait::Turn};

/// How long a ticket stays in the queue after its process died.
const TICKET_TTL: Duration = Duration::from_secs(5);

/// How many tickets there may be, so that the rows they leave behind stay few.
const TICKETS: u32 = 1024;

/// How soon the first in the queue asks again; the others take as much longer as they are further back.
const NEXT: Duration = Duration::from_millis(8);

impl<S: LeaseStore> LeaseRequest<S> {
    /// Asks for the lease when no older ticket is left.
    ///
    /// A ticket's number is its fence: it comes from the store's clock, whichever key it was granted for.
    pub(super) async fn ask_in_turn(&self, place: &Place<S>, likely_free: bool) -> Result<Turn<Lease<S>>> {
        let queue = format!("{}/queue/", self.key);
        let ticket = if let Some(ticket) = place.take() {
            ticket
        } else {
            if likely_free && self.inner.store().list(&queue, 1).await?.is_empty() {
                // Nobody waits, so nobody is overtaken.
                if let Turn::Done(lease) = self.ask_for(&self.key, true).await? {
                    return Ok(Turn::Done(lease));
                }
            }
            let request = LeaseRequest::new(self.inner.clone(), self.key.clone(), Mode::Exclusive).ttl(TICKET_TTL);
            match request.ask_for_number("queue", TICKETS).await? {
                Turn::Done(ticket) => ticket,
                held => return Ok(held),
            }
        };
        let waiting = self.inner.store().list(&queue, TICKETS).await?;
        let is_before = |fence, key: &_| (fence, key) < (ticket.fence(), ticket.key());
        let ahead = waiting.iter().filter(|it| is_before(it.info.fence, &it.info.key)).count();
        let turn = if ahead == 0 {
            match self.ask_for(&self.key, likely_free).await? {
                Turn::Held { free_in } => Turn::Held { free_in: Some(free_in.map_or(NEXT, |it| it.min(NEXT))) },
                // The ticket is given back in the background.
                taken => return Ok(taken),
            }
        } else {
            let ahead = u32::try_from(ahead).unwrap_or(TICKETS);
            Turn::Queued { ahead, pause: NEXT * ahead }
        };
        place.put(ticket);
        Ok(turn)
    }
}
