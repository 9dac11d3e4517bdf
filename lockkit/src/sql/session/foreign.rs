//! Session locks with numbers that other programs chose: PostgreSQL's advisory locks as they are, and those of known projects.

use crc::{CRC_32_ISO_HDLC, Crc};

use super::{AdvisoryNumber, SessionLock, SessionName};
use crate::value::key::Key;

/// The factor of Rails' migrations, which keeps their locks apart from those of others.
const RAILS_SALT: i64 = 2_053_462_845;

/// The factor of golang-migrate.
const GOLANG_MIGRATE_SALT: u32 = 1_486_364_155;

/// Between the names that golang-migrate hashes.
const NUL: [u8; 1] = [0];

impl SessionLock {
    /// The advisory lock with this number, as `SELECT pg_advisory_lock(number)` takes it in another program. PostgreSQL only:
    /// MySQL and MariaDB lock names, not numbers, so [`acquire`](Self::acquire) returns
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) there.
    ///
    /// In errors and telemetry the lock is called `pg_advisory_lock(<number>)`. Use [`new`](Self::new) for a lock that only
    /// lockkit takes: its number cannot be that of another program by accident.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let session = lockkit::SessionLock::raw(4711).acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    pub fn raw(number: i64) -> Self {
        let key = Key::from(format!("pg_advisory_lock({number})"));
        Self::named(SessionName { key, number: Some(AdvisoryNumber::One(number)) })
    }

    /// The advisory lock with these two numbers, as `SELECT pg_advisory_lock(first, second)` takes it in another program. No
    /// [`raw`](Self::raw) number names the same lock. PostgreSQL only, as [`raw`](Self::raw).
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let session = lockkit::SessionLock::raw2(4711, -1).acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    pub fn raw2(first: i32, second: i32) -> Self {
        let key = Key::from(format!("pg_advisory_lock({first}, {second})"));
        Self::named(SessionName { key, number: Some(AdvisoryNumber::Two(first, second)) })
    }

    /// The lock that the Ruby gem [with_advisory_lock] takes for a name that is a text: `crc32(name) & 0x7fffffff`, and as second
    /// number its environment variable `WITH_ADVISORY_LOCK_PREFIX`, whose leading number Ruby reads. Give `""` for `prefix` where
    /// the variable is not set. For a name that is a number, use [`raw2`](Self::raw2) with that number. PostgreSQL only.
    ///
    /// The gem's lock is shared if its option `shared` is set; use [`share`](Self::share) for that.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// // Ruby: User.with_advisory_lock("invoices") { … }
    /// let session = lockkit::SessionLock::with_advisory_lock("invoices", "").acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    ///
    /// [with_advisory_lock]: https://github.com/ClosureTree/with_advisory_lock
    pub fn with_advisory_lock(name: &str, prefix: &str) -> Self {
        Self::raw2(positive(crc32(&[name.as_bytes()])), positive(ruby_integer(prefix)))
    }

    /// The lock that the migrations of [Rails] take: `2053462845 * crc32(database)`. While it is held, `rails db:migrate` fails
    /// with `ConcurrentMigrationError`, because Rails does not wait. `database` is the name that `current_database()` returns.
    /// PostgreSQL only.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let session = lockkit::SessionLock::rails_migrations("shop_production").acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    ///
    /// [Rails]: https://github.com/rails/rails/blob/main/activerecord/lib/active_record/migration.rb
    pub fn rails_migrations(database: &str) -> Self {
        // Below 2^63: each factor has at most 31 and 32 bits.
        Self::raw(RAILS_SALT * i64::from(crc32(&[database.as_bytes()])))
    }

    /// The lock that [golang-migrate] version 4 takes with its drivers `postgres` and `pgx`. By default the schema is that of
    /// `current_schema()` and the table is `schema_migrations`. PostgreSQL only.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let session = lockkit::SessionLock::golang_migrate("shop", "public", "schema_migrations").acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    ///
    /// [golang-migrate]: https://github.com/golang-migrate/migrate/blob/master/database/util.go
    pub fn golang_migrate(database: &str, schema: &str, table: &str) -> Self {
        let hash = crc32(&[schema.as_bytes(), &NUL, table.as_bytes(), &NUL, database.as_bytes()]);
        Self::raw(i64::from(hash.wrapping_mul(GOLANG_MIGRATE_SALT)))
    }
}

/// CRC-32 as in zlib, of the parts one after the other.
fn crc32(parts: &[&[u8]]) -> u32 {
    const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);
    let mut digest = CRC.digest();
    for part in parts {
        digest.update(part);
    }
    digest.finalize()
}

/// The low 31 bits.
fn positive(bits: u32) -> i32 {
    (bits & 0x7fff_ffff).cast_signed()
}

/// The low 32 bits of the number that Ruby's `String#to_i` reads: spaces, a sign, then digits with single underscores between
/// them. Zero if there is none.
fn ruby_integer(text: &str) -> u32 {
    let text = text.trim_start_matches(|it: char| it.is_ascii_whitespace() || it == '\u{b}');
    let (is_negative, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (text.starts_with('-'), digits),
        None => (false, text),
    };
    let (mut number, mut after_digit) = (0_u32, false);
    for char in digits.chars() {
        match char.to_digit(10) {
            Some(digit) => (number, after_digit) = (number.wrapping_mul(10).wrapping_add(digit), true),
            None if char == '_' && after_digit => after_digit = false,
            None => break,
        }
    }
    if is_negative { number.wrapping_neg() } else { number }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(lock: &SessionLock) -> AdvisoryNumber {
        lock.name.number.expect("a lock of a number")
    }

    // Computed by the projects' own formulas with Python's `zlib.crc32`.
    #[test]
    fn numbers_are_those_of_the_other_projects() {
        assert_eq!(number(&SessionLock::with_advisory_lock("invoices", "")), AdvisoryNumber::Two(1_781_477_269, 0));
        assert_eq!(number(&SessionLock::with_advisory_lock("a", "12")), AdvisoryNumber::Two(1_756_872_259, 12));
        assert_eq!(
            number(&SessionLock::with_advisory_lock("заказ", "-1")),
            AdvisoryNumber::Two(1_233_705_972, 2_147_483_647)
        );
        assert_eq!(number(&SessionLock::with_advisory_lock("", "")), AdvisoryNumber::Two(0, 0));
        assert_eq!(
            number(&SessionLock::rails_migrations("shop_production")),
            AdvisoryNumber::One(5_843_596_595_875_314_990)
        );
        assert_eq!(number(&SessionLock::rails_migrations("postgres")), AdvisoryNumber::One(737_815_420_147_457_505));
        assert_eq!(number(&SessionLock::rails_migrations("a")), AdvisoryNumber::One(8_017_449_788_680_775_415));
        // The last is from golang-migrate's own tests.
        assert_eq!(
            number(&SessionLock::golang_migrate("shop", "public", "schema_migrations")),
            AdvisoryNumber::One(3_689_236_698)
        );
        assert_eq!(
            number(&SessionLock::golang_migrate("database_name", "schema_name_1", "schema_name_2")),
            AdvisoryNumber::One(3_743_845_847)
        );
    }

    #[test]
    fn a_prefix_is_read_as_ruby_reads_it() {
        for (text, expected) in [
            ("", 0),
            ("abc", 0),
            ("12", 12),
            (" \t12abc", 12),
            ("+7", 7),
            ("-1", 0x7fff_ffff),
            ("1_000", 1000),
            ("1__0", 1),
            ("_1", 0),
            ("- 1", 0),
            ("2147483648", 0),
            ("4294967297", 1),
            ("99999999999999999999", 1_661_992_959),
        ] {
            assert_eq!(positive(ruby_integer(text)), expected, "{text:?}");
        }
    }
}
