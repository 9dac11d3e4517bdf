//! Literals among the values of arguments.

use syn::{Expr, ExprLit, ExprUnary, Lit, UnOp};

/// The expression without the invisible group that a `macro_rules!` macro puts around it.
pub(crate) fn ungrouped(mut expr: &Expr) -> &Expr {
    while let Expr::Group(group) = expr {
        expr = &group.expr;
    }
    expr
}

/// The literal, if the expression is one.
pub(crate) fn literal(expr: &Expr) -> Option<&Lit> {
    match ungrouped(expr) {
        Expr::Lit(ExprLit { lit, .. }) => Some(lit),
        _ => None,
    }
}

/// Whether the expression starts with a minus.
pub(crate) fn is_negative(expr: &Expr) -> bool {
    matches!(ungrouped(expr), Expr::Unary(ExprUnary { op: UnOp::Neg(_), .. }))
}
