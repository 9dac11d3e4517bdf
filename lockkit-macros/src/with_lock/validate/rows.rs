//! Which rows a row lock locks: its table, the columns that pick the rows, and their order and number.
//!
//! With `skip_locked`, the attribute does not query whether the other rows are locked or missing: the answer would be
//! out of date when the body runs, and a consumer reacts in the same way. `limit` and `skip_locked` require `rows`,
//! since a body that selected the rows again could get another consumer's.

use syn::{Expr, Ident, Lit, LitStr, ext::IdentExt, spanned::Spanned};

use crate::{
    diagnostics::{Given, error},
    names::{fault_of_column, fault_of_table},
    with_lock::{
        arguments::Argument,
        columns::By,
        forms::Typed,
        plan::{Row, Section},
        validate::{Checker, literal::literal},
    },
};

/// The arguments that pick the rows, as written.
pub(super) struct Picked {
    pub(super) by: Option<Given<Vec<By>>>,
    pub(super) by_any: Option<Given<Vec<By>>>,
    pub(super) order_by: Option<Given<Vec<Ident>>>,
    pub(super) limit: Option<Given<Expr>>,
    pub(super) skip_locked: Option<Given<()>>,
}

impl Picked {
    pub(super) fn into_row(self, table: LitStr, section: Section) -> Row {
        let Self { by, by_any, order_by, limit, skip_locked } = self;
        Row {
            table,
            by: by.map(|it| it.value).unwrap_or_default(),
            by_any: by_any.map(|it| it.value).unwrap_or_default(),
            order_by: order_by.map(|it| it.value).unwrap_or_default(),
            limit: limit.map(|it| it.value),
            skips_locked: skip_locked.is_some(),
            section,
        }
    }
}

impl Checker<'_> {
    pub(super) fn table(&mut self, table: &Expr) -> Option<LitStr> {
        let Some(Lit::Str(literal)) = literal(table) else {
            self.fail(table.span(), r#"the table is a string literal: `table = "t_items"`"#);
            return None;
        };
        if let Some(fault) = fault_of_table(&literal.value()) {
            self.fail(
                literal.span(),
                format!("`{}` cannot be the name of a table: {fault}", literal.value().escape_debug()),
            );
            return None;
        }
        Some(literal.clone())
    }

    /// The rows of the body, or its one row.
    pub(super) fn rows(&mut self, rows: Option<Given<Typed>>, row: Option<Given<Typed>>) -> Option<Typed> {
        if let (Some(_), Some(Given { name, .. })) = (&rows, &row) {
            self.errors.push(error(name, "`row` and `rows` are both given; keep one of them"));
        }
        rows.or(row).map(|it| it.value)
    }

    /// Checks the arguments that pick rows, and that the body knows which rows it got.
    pub(super) fn picked(&mut self, picked: &Picked, has_rows: bool) {
        let Picked { by, by_any, order_by, limit, skip_locked } = picked;
        let is_queue = order_by.is_some() && limit.is_some() && skip_locked.is_some();
        let is_broken = self.is_broken("by") || self.is_broken("by_any");
        if by.is_none() && by_any.is_none() && !is_queue && !is_broken {
            let message = "`row` needs `by(item_id = item_id)` or `by_any(item_id = item_ids)`: the columns and \
                           values of the rows to lock";
            self.errors.push(error(&self.at, message));
        }
        for Given { name, value } in [by, by_any].into_iter().flatten() {
            if let (true, Some(it)) = (value.is_empty(), Argument::named(&name.to_string())) {
                self.errors.push(error(name, format!("`{name}` names no column; write `{}`", it.example)));
            }
        }
        if let Some(Given { name, value }) = order_by
            && value.is_empty()
        {
            self.errors.push(error(name, "`order_by` names no column; write `order_by(item_id)`"));
        }
        let by = [by, by_any].into_iter().flatten().flat_map(|it| &it.value).map(|it| &it.column);
        self.columns(by);
        self.columns(order_by.iter().flat_map(|it| &it.value));
        if let Some(Given { name, value }) = limit {
            self.number(name, value, "a limit of 0 locks no row");
        }
        if has_rows || self.is_broken("rows") || self.is_broken("row") {
            return;
        }
        if let Some(Given { name, .. }) = skip_locked {
            let message = "with `skip_locked` the body must know which rows it got: add `rows = items: Vec<Item>`; or \
                           write `wait = \"0s\"` instead, to be busy at once when one of the rows is locked";
            self.errors.push(error(name, message));
        } else if let Some(Given { name, .. }) = limit {
            let message = "with `limit` the body must know which rows it got: add `rows = items: Vec<Item>`";
            self.errors.push(error(name, message));
        }
    }

    /// Refuses columns that cannot be, or are there twice.
    fn columns<'c>(&mut self, columns: impl Iterator<Item = &'c Ident>) {
        let mut seen = Vec::new();
        for column in columns {
            let name = column.unraw().to_string();
            if let Some(fault) = fault_of_column(&name) {
                self.fail(column.span(), format!("`{name}` cannot be the name of a column: {fault}"));
            } else if seen.contains(&name) {
                self.fail(column.span(), format!("the column `{name}` is given twice; remove one"));
            }
            seen.push(name);
        }
    }
}
