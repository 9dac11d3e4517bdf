CREATE TABLE t_catalogue (
    item_id BIGINT NOT NULL PRIMARY KEY,
    name    TEXT NOT NULL,
    stock   BIGINT NOT NULL CHECK (stock >= 0)
);

INSERT INTO t_catalogue (item_id, name, stock) VALUES (1, 'Concert ticket', 30), (2, 'Poster', 100);

-- A real shop makes this index unique as well. Here the lock alone keeps a user from ordering twice.
CREATE TABLE t_orders (user_id BIGINT NOT NULL);
CREATE INDEX i_orders ON t_orders (user_id);
