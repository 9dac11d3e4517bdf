CREATE TABLE t_payments (
    payment_id BIGINT NOT NULL PRIMARY KEY,
    user_id    BIGINT NOT NULL,
    cents      BIGINT NOT NULL
);

-- How often the item was counted in the warehouse.
ALTER TABLE t_catalogue ADD COLUMN counted BIGINT NOT NULL DEFAULT 0;
